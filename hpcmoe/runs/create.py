"""Making a run and handing it to a scheduler: from a checked config to a job id. Not for composing or checking configs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hpcmoe.config.freeze import freeze
from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.files import write_atomic
from hpcmoe.resources import make_plugins_importable
from hpcmoe.runs.jobspec import job_spec
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.place import local_pid, process_start_ticks
from hpcmoe.runs.provenance import write_provenance
from hpcmoe.runs.registry import new_run_id, runs_root
from hpcmoe.runs.rundir import RunDir
from hpcmoe.slurm.command import SlurmRejected, SlurmUnreachable


def create_run(cfg: Config, overrides: list[str], root: Path | None = None) -> RunDir:
    """A new run directory with its frozen config, provenance and first journal line. It appears whole or not at all."""
    root = root or runs_root()
    root.mkdir(parents=True, exist_ok=True)
    run_id = new_run_id(root)
    draft = RunDir(root / f".{run_id}.new")
    try:
        for folder in (draft.control, draft.attempts, draft.checkpoints, draft.script.parent):
            folder.mkdir(parents=True)
        freeze(cfg, draft.config)
        write_atomic(draft.overrides, "".join(f"{override}\n" for override in overrides))
        write_provenance(draft, cfg.cluster.scheduler)
        Journal(draft.journal).append(
            "planned",
            run_id=run_id,
            name=cfg.name or cfg.model.name,
            model=cfg.model.name,
            cluster=cfg.cluster.name,
            scheduler=cfg.cluster.scheduler,
            nodes=cfg.nodes,
            gpus_per_node=cfg.gpus_per_node,
            steps=cfg.train.steps,
        )
        draft.path.rename(root / run_id)
    except BaseException:
        shutil.rmtree(draft.path, ignore_errors=True)
        raise
    return RunDir(root / run_id)


def submit_run(run: RunDir, cfg: Config, how: str = "submit") -> str:
    """Submit the run; returns the job id. A refusal by Slurm is a UserError, and a run that Slurm never took is removed."""
    make_plugins_importable()
    from hydra_plugins.hpcmoe_launchers import executor_for

    starts = sum(event["event"] == "submitted" for event in read_journal(run.journal))
    spec = job_spec(run, cfg, token=f"{run.run_id}-{starts}")
    try:
        job_id = executor_for(cfg, run.path / "sbatch").submit_run(spec)[0]
    except SlurmUnreachable as error:
        Journal(run.journal).append("submit_failed", reason=str(error))
        raise UserError(
            f"run {run.run_id} is planned but not submitted: {error}; `hpcmoe resume {run.run_id}` tries again"
        ) from error
    except UserError as refused:
        if starts == 0:
            shutil.rmtree(run.path)
        if isinstance(refused, SlurmRejected):
            raise UserError(f"Slurm refuses the job: {refused}") from refused
        raise
    journal_submitted(run, job_id, how)
    return job_id


def journal_submitted(run: RunDir, job_id: str, how: str) -> None:
    ticks = process_start_ticks(local_pid(job_id)) if job_id.startswith("local-") else None
    Journal(run.journal).append("submitted", job_id=job_id, how=how, uid=os.getuid(), start_ticks=ticks)
