"""From the points of a multirun to submitted runs: compose all, check all, then create and submit, array by array."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from hpcmoe.config.compose import to_config
from hpcmoe.config.schema import Config
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.planner.check import prepare
from hpcmoe.runs.create import ceiling_flag, create_run, journal_submitted
from hpcmoe.runs.estimate import confirm, estimate_gpu_hours
from hpcmoe.runs.jobspec import JobSpec, render
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.submission import begin
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError, SlurmUnreachable
from hydra_plugins.hpcmoe_launchers import executor_for


@dataclass(frozen=True)
class Point:
    """One point of the sweep, checked."""

    index: int
    overrides: tuple[str, ...]
    composed: DictConfig  # with Hydra's own node
    config: Config
    gpu_hours: float | None  # an estimate

    @property
    def shape(self) -> tuple[str, int | None]:
        """Equal for points that may be tasks of one array: they differ in nothing that Slurm or the job script sees."""
        return render(_spec([RunDir(Path("/RUN"))], self.config, "NAME", "TOKEN")), self.config.slurm.array_parallelism


def compose_points(
    loader: ConfigLoader, master: DictConfig, job_overrides: Sequence[Sequence[str]], first_index: int
) -> list[Point]:
    """Every point of the sweep. Raises UserError for the first one that is no valid run."""
    setup_globals()
    outer = HydraConfig.instance().cfg
    try:
        return [_compose(loader, master, overrides, first_index + i) for i, overrides in enumerate(job_overrides)]
    finally:
        HydraConfig.instance().cfg = outer


def _compose(loader: ConfigLoader, master: DictConfig, overrides: Sequence[str], index: int) -> Point:
    composed = loader.load_sweep_config(master, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = str(index)
        composed.hydra.job.num = index
    HydraConfig.instance().set_config(composed)  # what ${hydra:...} in the config refers to
    words = tuple(filter_overrides(overrides))
    try:
        config = validate(to_config(composed))
        plan = prepare(config)
        speed = plan.tokens_per_s if plan is not None else None
        point = Point(index, words, composed, config, estimate_gpu_hours(config, speed))
        ceiling_flag(config)
        _ = point.shape  # what a job script cannot carry is found here, before anything is written
    except UserError as error:
        raise UserError(f"point {index} ({' '.join(words)}): {error}") from error
    return point


def preview_points(points: Sequence[Point]) -> list[JobReturn]:
    """Every point's checked config as its return value; nothing is written."""
    return [_return(point, point.config, "") for point in points]


def confirm_points(points: Sequence[Point], yes: bool) -> None:
    """Ask before a costly sweep: the points together, by the lowest bound that one of them sets. Raises UserError for a no."""
    bounds = [point.config.resilience.ask_above_gpu_hours for point in points]
    confirm([point.gpu_hours for point in points], min((bound for bound in bounds if bound is not None), default=None), yes)


def submit_points(points: Sequence[Point], master: DictConfig) -> list[JobReturn]:
    """Create the runs and submit them. Raises UserError when Slurm refuses, and says which points are submitted already."""
    sweep_dir = Path(str(master.hydra.sweep.dir)).absolute()
    (sweep_dir / "sbatch").mkdir(parents=True, exist_ok=True)
    returns: dict[int, JobReturn] = {}
    for batch in batches(points, _most_tasks(points)):
        returns.update(_submit_batch(batch, sweep_dir, done=len(returns)))
    return [returns[point.index] for point in points]


def batches(points: Sequence[Point], most: int) -> Iterator[list[Point]]:
    """Points of one job shape together, at most ``most`` of them."""
    shapes: dict[tuple[str, int | None], list[Point]] = {}
    for point in points:
        shapes.setdefault(point.shape, []).append(point)
    for alike in shapes.values():
        for first in range(0, len(alike), most):
            yield alike[first : first + most]


def _most_tasks(points: Sequence[Point]) -> int:
    """Local runs are started one by one and take turns; an array may have MaxArraySize tasks, as that caps the index."""
    if any(point.config.cluster.scheduler == "slurm" for point in points):
        return client.cluster_facts().max_array_size
    return 1


def _submit_batch(batch: Sequence[Point], sweep_dir: Path, done: int) -> dict[int, JobReturn]:
    if batch[0].config.cluster.scheduler == "local" and len(batch) > 1:
        returns: dict[int, JobReturn] = {}
        for point in batch:
            returns |= _submit_batch([point], sweep_dir, done + len(returns))
        return returns
    config = batch[0].config
    executor, flags = executor_for(config, sweep_dir / "sbatch"), tuple(ceiling_flag(config))
    runs = [create_run(point.config, list(point.overrides)) for point in batch]
    part = _free_part(sweep_dir)
    name = f"hpcmoe-{sweep_dir.name}" if len(runs) > 1 else f"hpcmoe-{runs[0].run_id}"
    token = f"{runs[0].run_id}-0"
    spec = _spec(runs, config, config.slurm.job_name or name, token, sweep_dir, part)
    for task, run in enumerate(runs):
        begin(run, token, "sweep", task=task if spec.is_array else None)
    try:
        job_ids = executor.submit_run(replace(spec, sbatch_args=flags))
    except (SlurmError, UserError) as error:
        raise _not_submitted(runs, error, done) from error
    with (sweep_dir / "runs.txt").open("a", encoding="utf-8") as listed:
        listed.writelines(f"{run.path}\n" for run in runs)
    for run, job_id in zip(runs, job_ids, strict=True):
        journal_submitted(run, job_id, "sweep")
    return {
        point.index: _return(point, {"run_id": run.run_id, "job_id": job_id, "run_dir": str(run.path)}, str(run.path))
        for point, run, job_id in zip(batch, runs, job_ids, strict=True)
    }


def _spec(runs: Sequence[RunDir], config: Config, name: str, token: str, sweep_dir: Path | None = None, part: int = 0) -> JobSpec:
    return JobSpec(tuple(run.path for run in runs), config, sys.executable, name, token, sweep_dir=sweep_dir, part=part)


def _free_part(sweep_dir: Path) -> int:
    """The number of the sweep's next array; a sweeper may launch several batches into one sweep."""
    part = 0
    while (sweep_dir / "sbatch" / f"array-{part}.sh").exists():
        part += 1
    return part


def _not_submitted(runs: Sequence[RunDir], error: UserError, done: int) -> UserError:
    """Runs that Slurm has surely not got are removed; where its answer was lost they stay, to be found and resumed."""
    before = f"; {done} points before are submitted: `hpcmoe status`" if done else ""
    if isinstance(error, SlurmUnreachable):
        for run in runs:
            Journal(run.journal).append("submit_failed", reason=str(error))
        return UserError(f"{len(runs)} runs are planned but not submitted: {error}; `hpcmoe resume RUN` tries again{before}")
    for run in runs:
        shutil.rmtree(run.path)
    return UserError(f"the job is refused: {error}{before}")


def _return(point: Point, value: Config | dict[str, Any], directory: str) -> JobReturn:
    task_config = OmegaConf.masked_copy(point.composed, [str(key) for key in point.composed if key != "hydra"])
    done = JobReturn(overrides=list(point.overrides), cfg=task_config, hydra_cfg=point.composed, working_dir=directory)
    done.task_name = "hpcmoe"
    done.status = JobStatus.COMPLETED
    done.return_value = value
    return done
