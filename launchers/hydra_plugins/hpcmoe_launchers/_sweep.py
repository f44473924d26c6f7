"""From checked points to submitted runs: create the runs, list them as a sweep's points, submit them array by array."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.runs.create import ceiling_flag, create_run, journal_submitted
from hpcmoe.runs.jobspec import JobSpec
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.submission import begin
from hpcmoe.runs.sweep import SweepDir, SweepPoint, create_sweep
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError, SlurmUnreachable
from hydra_plugins.hpcmoe_launchers import executor_for
from hydra_plugins.hpcmoe_launchers._points import Point, Preview, previews


def preview_points(points: Sequence[Point]) -> list[JobReturn]:
    """What each point would be as its return value; nothing is written."""
    return [_return(point, preview, "") for point, preview in zip(points, previews(points), strict=True)]


def submit_points(points: Sequence[Point], master: DictConfig, launcher: str = "hpcmoe") -> list[JobReturn]:
    """Create the runs and submit them. Raises UserError when Slurm refuses, and says which points are submitted already."""
    policy = policy_of(points)
    typed = [str(word) for word in master.hydra.overrides.task]
    sweep = create_sweep(Path(str(master.hydra.sweep.dir)), launcher=launcher, overrides=typed, policy=policy)
    first = max((point.index for point in sweep.read_points()), default=-1) + 1
    returns: dict[int, JobReturn] = {}
    for batch in batches(points, _most_tasks(points)):
        returns.update(_submit_batch(batch, sweep, first - points[0].index, done=len(returns)))
    return [returns[point.index] for point in points]


def policy_of(points: Sequence[Point]) -> dict[str, Any]:
    """What the sweep as a whole keeps to. Raises UserError where its points do not agree."""
    policies = [{**asdict(p.config.sweep), "throttle": p.config.slurm.array_parallelism} for p in points]
    for key, first in policies[0].items():
        other = next((policy[key] for policy in policies if policy[key] != first), first)
        if other != first:
            name = "slurm.array_parallelism" if key == "throttle" else f"sweep.{key}"
            raise UserError(f"{name} is {first} for one point and {other} for another; it holds for the whole sweep")
    return policies[0]


def batches(points: Sequence[Point], most: int) -> Iterator[list[Point]]:
    """Points of one job shape together, at most ``most`` of them."""
    shapes: dict[str, list[Point]] = {}
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


def _submit_batch(batch: Sequence[Point], sweep: SweepDir, shift: int, done: int) -> dict[int, JobReturn]:
    """``shift``: from a point's index in the multirun to that in the sweep."""
    config = batch[0].config
    executor, flags = executor_for(config, sweep.sbatch), tuple(ceiling_flag(config))
    runs = [create_run(point.config, list(point.overrides)) for point in batch]
    part = _free_part(sweep)
    name = f"hpcmoe-{sweep.sweep_id}" if len(runs) > 1 else f"hpcmoe-{runs[0].run_id}"
    token = f"{runs[0].run_id}-0"
    spec = _spec(runs, config, config.slurm.job_name or name, token, sweep.path, part)
    for task, run in enumerate(runs):
        begin(run, token, "sweep", task=task if spec.is_array else None)
    try:
        job_ids = executor.submit_run(replace(spec, sbatch_args=flags))
    except (SlurmError, UserError) as error:
        raise _not_submitted(runs, error, done) from error
    listed = [
        SweepPoint(point.index + shift, point.overrides, point.key, run.run_id, None, point.gpu_hours, point.shape)
        for point, run in zip(batch, runs, strict=True)
    ]
    sweep.append_points(listed)
    sweep.journal("array_submitted", job_id=job_ids[0].partition("_")[0], part=part, points=[point.index for point in listed])
    for run, job_id in zip(runs, job_ids, strict=True):
        journal_submitted(run, job_id, "sweep")
    return {
        point.index: _return(point, {"run_id": run.run_id, "job_id": job_id, "run_dir": str(run.path)}, str(run.path))
        for point, run, job_id in zip(batch, runs, job_ids, strict=True)
    }


def _spec(runs: Sequence[RunDir], config: Config, name: str, token: str, sweep_dir: Path | None = None, part: int = 0) -> JobSpec:
    return JobSpec(tuple(run.path for run in runs), config, sys.executable, name, token, sweep_dir=sweep_dir, part=part)


def _free_part(sweep: SweepDir) -> int:
    """The number of the sweep's next array; a sweeper may launch several batches into one sweep."""
    part = 0
    while (sweep.sbatch / f"array-{part}.sh").exists():
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


def _return(point: Point, value: Preview | dict[str, Any], directory: str) -> JobReturn:
    done = JobReturn(overrides=list(point.overrides), cfg=point.task_config, working_dir=directory)
    done.task_name = "hpcmoe"
    done.status = JobStatus.COMPLETED
    done.return_value = value
    return done
