"""What a user does to a whole sweep: cancel it, resume it, change its throttle. Runs are hpcmoe.runs.control's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcmoe.errors import UserError
from hpcmoe.locks import file_lock
from hpcmoe.runs.advance import advance, advance_once
from hpcmoe.runs.control import LOCK_WAIT_S, cancel_all, make_ready
from hpcmoe.runs.observe import RunView
from hpcmoe.runs.points import HELD_BACK
from hpcmoe.runs.results import PointResult
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import read_record
from hpcmoe.runs.sweep import SweepDir
from hpcmoe.runs.sweep_life import life_of, stop_reason
from hpcmoe.text import many

RESUMED = frozenset({"STOPPED", "CANCELLED", "FAILED", "UNKNOWN"})


def cancel_points(sweep: SweepDir, points: Sequence[PointResult], whole: bool) -> list[RunView]:
    """End the runs of these points for good; ``whole``: the sweep starts no more runs. Those that are over stay as they are.

    Raises UserError where there is nothing to cancel, and as hpcmoe.runs.control.cancel_all does.
    """
    runs = [view.record.run for view in _views(points) if not view.final]
    if not runs:
        raise UserError(f"sweep {sweep.sweep_id}: every run is over already; there is nothing to cancel")
    with file_lock(sweep.lock, LOCK_WAIT_S) as mine:  # whoever submits further runs of the sweep now is waited for
        if not mine:
            raise UserError(f"sweep {sweep.sweep_id} is being submitted by another process; try again")
        if whole:
            sweep.journal("cancelled", by=os.environ.get("USER"))
        views = cancel_all([*runs, *(_added_since(sweep, points) if whole else ())])[: len(runs)]
    if not whole:  # the jobs that ended meanwhile have found the lock taken, and left what they make room for to its holder
        advance(sweep, wait_s=LOCK_WAIT_S)
    return views


def _added_since(sweep: SweepDir, points: Sequence[PointResult]) -> list[RunDir]:
    """Runs that somebody added to the sweep after it was looked at."""
    known = {each.seen.point.run_id for each in points}
    return [run for run in sweep.runs() if run.run_id not in known and run.journal.exists()]


def _views(points: Iterable[PointResult]) -> list[RunView]:
    return [each.seen.view for each in points if each.seen.view is not None]


@dataclass(frozen=True)
class Resumed:
    """What became of a sweep that was resumed."""

    again: list[str]  # ids of the runs that are submitted again, now or when there is room
    refused: dict[str, str]  # run id -> why
    said: list[str]  # by hpcmoe.runs.advance

    def as_json(self) -> dict[str, Any]:
        return {"again": self.again, "refused": self.refused, "said": self.said}

    def lines(self) -> list[str]:
        lines = [f"{many(len(self.again), 'run')} to be submitted again"] if self.again else []
        return [*lines, *(f"run {run_id}: {why}" for run_id, why in self.refused.items()), *self.said]


def resume_points(sweep: SweepDir, points: Sequence[PointResult]) -> Resumed:
    """Bring the runs of these points back from their newest checkpoints, and let the sweep go on if it was stopped.

    They are submitted as its other points are: in arrays, as many as there is room for. Counts of failures start anew.
    """
    chosen = [each for each in points if each.state in RESUMED and each.seen.view and each.seen.view.resumable]
    waiting = [each for each in points if each.state == HELD_BACK]
    stopped = stop_reason(life_of(sweep))
    if not chosen and not waiting and stopped is None:
        raise UserError(f"sweep {sweep.sweep_id}: no run is stopped, cancelled, failed or lost; there is nothing to resume")
    refused: dict[str, str] = {}
    with file_lock(sweep.lock, LOCK_WAIT_S) as mine:
        if not mine:
            raise UserError(f"sweep {sweep.sweep_id} is being submitted by another process; try again")
        again = {each.index: str(each.seen.point.run_id) for each in waiting if _left_behind(sweep, each)}
        # Before they are ready, so that none is forgotten when this is interrupted; one that is not is turned away later on.
        sweep.journal("resumed", by=os.environ.get("USER"), points=sorted({*again, *(each.index for each in chosen)}))
        not_ready = []
        for each in chosen:
            run_id = str(each.seen.point.run_id)
            try:
                make_ready(sweep.run(run_id))
                again[each.index] = run_id
            except UserError as error:
                refused[run_id] = str(error)
                not_ready.append(each.index)
        if not_ready:
            sweep.journal("submitted_elsewhere", points=not_ready)
    done = advance_once(sweep, wait_s=LOCK_WAIT_S)
    refused |= {again[index]: why for index, why in done.refused.items() if index in again}
    lifted = [f"sweep {sweep.sweep_id} takes points again"] if stopped is not None and not again else []
    return Resumed([run_id for run_id in again.values() if run_id not in refused], refused, lifted + done.said)


def _left_behind(sweep: SweepDir, each: PointResult) -> bool:
    """A run that an interrupted resume made ready, and that its sweep no longer counts among those that wait."""
    life = read_record(sweep.run(str(each.seen.point.run_id))).life
    untouched = life.job_id is None and life.intent is None and life.ended is None
    return untouched and each.index in life_of(sweep).taken


def set_throttle(sweep: SweepDir, at_once: int | None) -> list[str]:
    """From now on at most ``at_once`` runs at once (None: no bound); those that run go on. What was done for it, in lines."""
    if sweep.facts.get("scheduler") == "local":
        raise UserError("without Slurm the runs of a sweep take turns on this machine: one at a time")
    sweep.journal("throttle", to=at_once, by=os.environ.get("USER"))
    return advance(sweep, wait_s=LOCK_WAIT_S)
