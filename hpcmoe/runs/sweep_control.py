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
from hpcmoe.runs.sweep import SweepDir
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
        return cancel_all(runs)


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
    waiting = sum(each.state == HELD_BACK for each in points)
    if not chosen and not waiting:
        raise UserError(f"sweep {sweep.sweep_id}: no run is stopped, cancelled, failed or lost; there is nothing to resume")
    refused: dict[str, str] = {}
    again: dict[int, str] = {}
    with file_lock(sweep.lock, LOCK_WAIT_S) as mine:
        if not mine:
            raise UserError(f"sweep {sweep.sweep_id} is being submitted by another process; try again")
        for each in chosen:
            run_id = str(each.seen.point.run_id)
            try:
                make_ready(sweep.run(run_id))
                again[each.seen.point.index] = run_id
            except UserError as error:
                refused[run_id] = str(error)
        sweep.journal("resumed", by=os.environ.get("USER"), points=list(again))
    done = advance_once(sweep, wait_s=LOCK_WAIT_S)
    refused |= {again[index]: why for index, why in done.refused.items() if index in again}
    return Resumed([run_id for run_id in again.values() if run_id not in refused], refused, done.said)


def set_throttle(sweep: SweepDir, at_once: int | None) -> list[str]:
    """From now on at most ``at_once`` runs at once (None: no bound); those that run go on. What was done for it, in lines."""
    if sweep.facts.get("scheduler") == "local":
        raise UserError("without Slurm the runs of a sweep take turns on this machine: one at a time")
    sweep.journal("throttle", to=at_once, by=os.environ.get("USER"))
    return advance(sweep, wait_s=LOCK_WAIT_S)
