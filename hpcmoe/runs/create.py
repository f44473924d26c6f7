"""Making a run and handing it to a scheduler: from a checked config to a job id. Not for composing or checking configs."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcmoe.config.freeze import plain_to_yaml, to_plain
from hpcmoe.config.key import config_key
from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.files import sync_all
from hpcmoe.resources import make_plugins_importable
from hpcmoe.runs.blame import exclude_flag
from hpcmoe.runs.budget import budgets_of, seconds_left, spent_reason, time_flag
from hpcmoe.runs.estimate import counted_gpus
from hpcmoe.runs.jobspec import job_spec
from hpcmoe.runs.journal import Event, Journal, read_journal
from hpcmoe.runs.lead import AUTO, next_lead_s
from hpcmoe.runs.life import fold
from hpcmoe.runs.notify import wishes
from hpcmoe.runs.place import local_pid, process_start_ticks
from hpcmoe.runs.provenance import write_provenance
from hpcmoe.runs.registry import new_run_id, runs_root
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import read_record
from hpcmoe.runs.submission import begin, over
from hpcmoe.slurm.command import SlurmError, SlurmRejected, SlurmUnreachable
from hpcmoe.slurm.submit import begin_flag, find_accounted, find_submitted


@dataclass(frozen=True)
class Membership:
    """A run's place in a sweep."""

    sweep: Path  # its directory
    point: int
    provenance: Path  # what the sweep's runs have in common


def create_run(
    cfg: Config, overrides: Sequence[str], root: Path | None = None, member: Membership | None = None, key: str | None = None
) -> RunDir:
    """A new run directory with its frozen config, provenance and first journal line. It appears whole or not at all.

    What is empty until the run starts is made then. ``member``: of a sweep's run, which has the sweep's provenance, and whose
    files the caller makes durable with ``sync_runs``. ``key``: the config's, where it is known already.
    """
    root = root or runs_root()
    root.mkdir(parents=True, exist_ok=True)
    run_id = new_run_id(root)
    draft = RunDir(root / f".{run_id}.new")
    plain = to_plain(cfg)
    try:
        draft.path.mkdir()
        draft.control.mkdir()  # a user may drop `stop` there before the run has started
        draft.config.write_text(plain_to_yaml(plain), encoding="utf-8")
        draft.overrides.write_text("".join(f"{override}\n" for override in overrides), encoding="utf-8")
        if member is None:
            write_provenance(draft.path, cfg.cluster.scheduler)
        Journal(draft.journal).append_unsynced(
            "planned",
            run_id=run_id,
            name=cfg.name or ("command" if cfg.runs_command else cfg.model.name),
            model=None if cfg.runs_command else cfg.model.name,
            engine=cfg.engine.name,
            steps_seen=not cfg.runs_command or cfg.engine.progress is not None,
            cluster=cfg.cluster.name,
            scheduler=cfg.cluster.scheduler,
            nodes=cfg.nodes,
            min_nodes=cfg.min_nodes,
            gpus_per_node=cfg.gpus_per_node,
            steps=None if cfg.runs_command else cfg.train.steps,
            notify=wishes(cfg.notify),
            key=key or config_key(plain),
            **({} if member is None else _membership(member)),
        )
        if member is None:
            sync_runs([draft])
        draft.path.rename(root / run_id)
    except BaseException:
        shutil.rmtree(draft.path, ignore_errors=True)
        raise
    return RunDir(root / run_id)


def _membership(member: Membership) -> dict[str, Any]:
    return {"sweep": str(member.sweep), "point": member.point, "provenance": str(member.provenance)}


def sync_runs(runs: Iterable[RunDir]) -> None:
    """Make new runs durable."""
    sync_all(path for run in runs for path in (run.config, run.overrides, run.journal))


def submit_run(
    run: RunDir,
    cfg: Config,
    how: str = "submit",
    until: float | None = None,
    orphan: Event | None = None,
    token: str | None = None,
) -> str:
    """Submit the run; returns the job id. A refusal by Slurm is a UserError, and a run that Slurm never took is removed.

    ``until``: the job is not to start before (epoch s). ``orphan``: the intent of a submission whose outcome nobody wrote, and
    whose writer is gone; its job is looked for first, and adopted. ``token``: of the submission that was decided on; where one of
    that name has been made since, none is.
    """
    try:
        return _submit_run(run, cfg, how, until, orphan, token)
    finally:
        over()


def _submit_run(run: RunDir, cfg: Config, how: str, until: float | None, orphan: Event | None, token: str | None) -> str:
    make_plugins_importable()
    from hydra_plugins.hpcmoe_launchers import executor_for

    told: dict[str, Any] = {}
    first, begun = how == "submit" and not fold(read_journal(run.journal)).jobs and orphan is None, False
    try:
        job_id = None if orphan is None else _adopt(orphan, cfg)
        if job_id is None:
            if orphan is not None and orphan.get("task") is not None:
                # an array's token must not come to stand for one run's job: the other runs of the sweep look for it, too
                Journal(run.journal).append("submit_refused", reason="Slurm has no such array")
                orphan = token = None
            token = token or fold(read_journal(run.journal)).token(run.run_id)
            begun = begin(run, token, how, instead_of=orphan["writer"] if orphan is not None else None)
            if not begun:
                raise UserError(being_submitted_text(run))
            if cfg.resilience.stop_lead_s == AUTO and cfg.cluster.scheduler == "slurm":
                told["stop_lead_s"] = next_lead_s(AUTO, read_journal(run.journal), cfg.slurm.time)
            lead = [f"--signal=B:USR1@{told['stop_lead_s']}"] if told else []
            flags = (*ceiling_flag(cfg, run), *begin_flag(until), *exclude_flag(run, to_plain(cfg)), *lead)
            spec = replace(job_spec(run, cfg, token), sbatch_args=flags)
            job_id = executor_for(cfg, run.path / "sbatch").submit_run(spec)[0]
    except SlurmUnreachable as error:
        Journal(run.journal).append("submit_failed", reason=str(error))
        raise UserError(
            f"run {run.run_id} is planned but not submitted: {error}; `hpcmoe resume {run.run_id}` tries again"
        ) from error
    except UserError as refused:
        if begun:
            _refused(run, first, str(refused))
        if isinstance(refused, SlurmRejected):
            raise UserError(f"Slurm refuses the job: {refused}") from refused
        raise
    journal_submitted(run, job_id, how, until, **told)
    return job_id


def being_submitted_text(run: RunDir) -> str:
    return f"run {run.run_id} is being submitted by another process; `hpcmoe status {run.run_id}` shows it"


def _refused(run: RunDir, first: bool, reason: str) -> None:
    if first:
        shutil.rmtree(run.path)
    else:
        Journal(run.journal).append("submit_refused", reason=reason)


def _adopt(intent: Event, cfg: Config) -> str | None:
    """The job of a submission whose outcome nobody wrote; None when Slurm has none. Raises SlurmUnreachable when it is silent."""
    if cfg.cluster.scheduler != "slurm":
        return None  # a process that was started has journalled its arrival
    token, task = str(intent["token"]), intent.get("task")
    found = find_submitted(token)
    if found is None:
        with contextlib.suppress(SlurmError):  # where there is accounting, it knows a job that the controller has forgotten
            found = find_accounted(token, float(intent["t"]))
    return found if found is None or task is None else f"{found}_{task}"


def ceiling_flag(cfg: Config, run: RunDir | None = None) -> list[str]:
    """A shorter --time where resilience.max_gpu_hours would be passed. Raises UserError when nothing is left of it."""
    record = read_record(run) if run is not None else None
    attempts = record.attempts if record is not None else []
    raised, events = (None, []) if record is None else (record.life.max_gpu_hours, record.events)
    budgets = budgets_of({"resilience": vars(cfg.resilience)}, raised, events)
    gpus, now = counted_gpus(cfg), time.time()
    if spent := spent_reason(attempts, budgets, now, gpus):
        raise UserError(f"{spent}; `hpcmoe resume RUN --max-gpu-hours N` raises it" if attempts else spent)
    return time_flag(seconds_left(attempts, budgets, now, gpus), cfg.slurm.time)


def journal_submitted(run: RunDir, job_id: str, how: str, until: float | None = None, sync: bool = True, **more: Any) -> None:
    """``sync``: False for one of many, which the caller makes durable."""
    local = job_id.startswith("local-")
    journal = Journal(run.journal)
    (journal.append if sync else journal.append_unsynced)(
        "submitted",
        job_id=job_id,
        how=how,
        uid=os.getuid(),
        host=os.uname().nodename if local else None,
        start_ticks=process_start_ticks(local_pid(job_id)) if local else None,
        not_before=until,
        **more,
    )
