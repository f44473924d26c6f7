"""What a user does to a whole sweep: cancel it, resume it, change its throttle. Runs are hpcmoe.runs.control's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcmoe.errors import UserError
from hpcmoe.locks import file_lock
from hpcmoe.runs.control import LOCK_WAIT_S, cancel_all, resume
from hpcmoe.runs.observe import RunView
from hpcmoe.runs.points import HELD_BACK
from hpcmoe.runs.results import PointResult
from hpcmoe.runs.rundir import RunDir
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
    with file_lock(sweep.lock, LOCK_WAIT_S):  # whoever submits further runs of the sweep now is waited for
        if whole:
            sweep.journal("cancelled", by=os.environ.get("USER"))
        return cancel_all(runs)


def _views(points: Iterable[PointResult]) -> list[RunView]:
    return [each.seen.view for each in points if each.seen.view is not None]


@dataclass(frozen=True)
class Resumed:
    """What became of a sweep that was resumed."""

    submitted: dict[str, str]  # run id -> job id
    refused: dict[str, str]  # run id -> why
    said: list[str]  # by hpcmoe.runs.advance

    def as_json(self) -> dict[str, Any]:
        return {"submitted": self.submitted, "refused": self.refused, "said": self.said}

    def lines(self) -> list[str]:
        lines = [f"{many(len(self.submitted), 'run')} submitted again"] if self.submitted else []
        return [*lines, *(f"run {run_id}: {why}" for run_id, why in self.refused.items()), *self.said]


def resume_points(sweep: SweepDir, points: Sequence[PointResult]) -> Resumed:
    """Bring the runs of these points back from their newest checkpoints, and let the sweep go on if it was stopped."""
    runs = [each.seen.view.record.run for each in points if each.state in RESUMED and each.seen.view and each.seen.view.resumable]
    waiting = sum(each.state == HELD_BACK for each in points)
    if not runs and not waiting:
        raise UserError(f"sweep {sweep.sweep_id}: no run is stopped, cancelled, failed or lost; there is nothing to resume")
    sweep.journal("resumed", by=os.environ.get("USER"))
    submitted: dict[str, str] = {}
    refused: dict[str, str] = {}
    for run in runs:
        _resume_one(run, submitted, refused)
    return Resumed(submitted, refused, [])


def _resume_one(run: RunDir, submitted: dict[str, str], refused: dict[str, str]) -> None:
    """One run's refusal is not another's."""
    try:
        submitted[run.run_id] = resume(run)
    except UserError as error:
        refused[run.run_id] = str(error)


def set_throttle(sweep: SweepDir, at_once: int | None) -> list[str]:
    """From now on at most ``at_once`` runs at once (None: no bound); what was said by those who carry it out."""
    sweep.journal("throttle", to=at_once, by=os.environ.get("USER"))
    return []
