"""Submitting points of a sweep together, once: as one array, or as the only point's own job.

The sweep's intent stands in its events before the job exists; each run's in its journal. What is submitted when is decided in
hpcmoe.runs.advance, which holds the sweep's lock meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from hpcmoe.config.freeze import load_frozen
from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.files import sync_all
from hpcmoe.resources import make_plugins_importable
from hpcmoe.runs.create import ceiling_flag, journal_submitted
from hpcmoe.runs.jobspec import JobSpec
from hpcmoe.runs.journal import Event, Journal, read_journal
from hpcmoe.runs.life import fold
from hpcmoe.runs.lifecycle import SUBMISSION_S
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.submission import begin_element, new_writer, over, process_gone
from hpcmoe.runs.sweep import SweepDir, SweepPoint
from hpcmoe.runs.sweep_life import SweepLife, fold_sweep
from hpcmoe.slurm.command import SlurmError, SlurmRejected, SlurmUnreachable
from hpcmoe.slurm.limits import no_room
from hpcmoe.slurm.submit import find_submitted


class NoRoom(SlurmError):  # noqa: N818
    """The user has as many jobs as they may; nothing is wrong with the job."""


def submit_batch(
    sweep: SweepDir,
    points: Sequence[SweepPoint],
    share: int | None = None,
    after: str | None = None,
    others: Callable[[], int] = lambda: 0,
) -> str | None:
    """Submit these points, of one job shape, as one job; returns its id. None: another process is at one of them.

    ``share``: most at once; ``after``: they start when this job has ended; ``others``: how many jobs the user has in the queue.
    Raises NoRoom, SlurmRejected with Slurm's reason, SlurmUnreachable when nobody can tell if there is a job, or UserError.
    """
    life = fold_sweep(sweep.read_events(), None)
    part, writer = life.parts, new_writer()
    token = f"{points[0].run_id}-s{part}"
    indices = [point.index for point in points]
    sweep.journal("submitting", token=token, part=part, points=indices, writer=writer)
    try:
        intent = fold_sweep(sweep.read_events(), None).intent
        if intent is None or intent["token"] != token:
            return None
        if not _all_begin(sweep, points, life, token, writer):
            return None
        return _submit(sweep, points, life, part, token, share, after, others)
    finally:
        over()


def _runs(sweep: SweepDir, points: Sequence[SweepPoint]) -> list[RunDir]:
    return [sweep.run(str(point.run_id)) for point in points]


def _how(point: SweepPoint, life: SweepLife) -> str:
    return "resume" if point.index in life.resumed else "promotion" if point.index in life.promoted else "sweep"


def _all_begin(sweep: SweepDir, points: Sequence[SweepPoint], life: SweepLife, token: str, writer: str) -> bool:
    """Journal the intent in every run. Where one has a job already, or is over, the others wait for the next try without it."""
    elsewhere = []
    for task, (point, run) in enumerate(zip(points, _runs(sweep, points), strict=True)):
        if not begin_element(run, token, _how(point, life), writer, task if len(points) > 1 else None):
            elsewhere.append(point.index)
    if elsewhere:
        sweep.journal("submitted_elsewhere", points=elsewhere)
        _take_back(sweep, points, token, "a run of its array has a job already", room=True)
    return not elsewhere


def _submit(
    sweep: SweepDir,
    points: Sequence[SweepPoint],
    life: SweepLife,
    part: int,
    token: str,
    share: int | None,
    after: str | None,
    others: Callable[[], int],
) -> str:
    make_plugins_importable()
    from hydra_plugins.hpcmoe_launchers import executor_for

    runs = _runs(sweep, points)
    try:
        config = load_frozen(runs[0].config)
        spec = _spec(sweep, runs, config, part, token, share, after)
        job_ids = executor_for(config, sweep.sbatch).submit_run(spec)
    except SlurmUnreachable as error:
        sweep.journal("not_submitted", token=token, points=[p.index for p in points], reason=str(error), lost=True)
        for run in runs:
            Journal(run.journal).append_unsynced("submit_failed", reason=str(error))
        raise
    except UserError as error:
        full = isinstance(error, SlurmRejected) and no_room(error, others)
        _take_back(sweep, points, token, str(error), room=full)
        if full:
            raise NoRoom(str(error)) from error
        raise
    job = job_ids[0].partition("_")[0]
    _submitted(sweep, points, life, token, job, part, share, job_ids)
    return job


def _spec(
    sweep: SweepDir, runs: Sequence[RunDir], config: Config, part: int, token: str, share: int | None, after: str | None
) -> JobSpec:
    name = f"hpcmoe-{sweep.sweep_id}" if len(runs) > 1 else f"hpcmoe-{runs[0].run_id}"
    return JobSpec(
        run_dirs=tuple(run.path for run in runs),
        config=config,
        python=sys.executable,
        job_name=config.slurm.job_name or name,
        token=token,
        dependency=f"afterany:{after}" if after else None,
        sweep_dir=sweep.path,
        part=part,
        at_once=share or 0,
        sbatch_args=tuple(ceiling_flag(config)),
    )


def _submitted(
    sweep: SweepDir,
    points: Sequence[SweepPoint],
    life: SweepLife,
    token: str,
    job: str,
    part: int,
    share: int | None,
    job_ids: Sequence[str],
) -> None:
    runs = _runs(sweep, points)
    for point, run, job_id in zip(points, runs, job_ids, strict=True):
        journal_submitted(run, job_id, _how(point, life), sync=False)
    sync_all(run.journal for run in runs)
    indices = [point.index for point in points]
    sweep.journal("array_submitted", token=token, job_id=job, part=part, points=indices, share=share)


def _take_back(sweep: SweepDir, points: Sequence[SweepPoint], token: str, reason: str, room: bool) -> None:
    """Slurm has no such job. ``room``: for want of room, or another passing reason: no need to ask ever more seldom."""
    for run in _runs(sweep, points):
        intent = fold(read_journal(run.journal)).intent
        if intent is not None and intent["token"] == token:
            Journal(run.journal).append_unsynced("submit_refused", reason=reason)
    sweep.journal("not_submitted", token=token, points=[point.index for point in points], reason=reason, room=room)


def settle_intent(sweep: SweepDir, intent: Event, now: float | None = None) -> bool:
    """Find out what became of a submission whose outcome nobody wrote. False: whoever began it may still be at it.

    Raises SlurmUnreachable when Slurm does not say.
    """
    age = (time.time() if now is None else now) - float(intent["t"])
    if not intent.get("abandoned") and not process_gone(str(intent["writer"])) and age < SUBMISSION_S:
        return False
    token = str(intent["token"])
    by_index = {point.index: point for point in sweep.read_points()}
    points = [by_index[int(index)] for index in intent["points"] if int(index) in by_index]
    job = find_submitted(token) if sweep.facts.get("scheduler") != "local" else _local_job(sweep, points)
    if job is None:
        _take_back(sweep, points, token, "Slurm has no such job", room=True)
        return True
    several, life = len(intent["points"]) > 1, fold_sweep(sweep.read_events(), None)
    mine = [p for p in points if (fold(read_journal(sweep.run(str(p.run_id)).journal)).intent or {}).get("token") == token]
    tasks = {int(index): task for task, index in enumerate(intent["points"])}
    for point in mine:
        job_id = f"{job}_{tasks[point.index]}" if several else job
        journal_submitted(sweep.run(str(point.run_id)), job_id, _how(point, life))
    sweep.journal("array_submitted", token=token, job_id=job, part=intent["part"], points=intent["points"], adopted=True)
    return True


def _local_job(sweep: SweepDir, points: Sequence[SweepPoint]) -> str | None:
    """A process that was started has journalled its arrival; one that waits for its turn has not, and is not found."""
    lives = [fold(read_journal(run.journal)) for run in _runs(sweep, points)]
    return next((life.job_id for life in lives if life.job_id is not None), None)
