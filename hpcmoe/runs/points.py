"""Where the points of a sweep stand, by one look at Slurm for all of them. Asks and reads; changes nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpcmoe.runs.glance import Glancer
from hpcmoe.runs.observe import RunView, observe
from hpcmoe.runs.sweep import SweepDir, SweepPoint
from hpcmoe.runs.sweep_life import life_of, stop_reason

HELD_BACK = "HELD_BACK"  # the run is made, and has no job yet: it waits for room


@dataclass(frozen=True)
class PointView:
    """A point's state: its run's, or of a duplicate that of the run that has its result."""

    point: SweepPoint
    view: RunView | None  # None: the run's directory is gone
    state: str  # a run's (hpcmoe.runs.observe), or HELD_BACK
    reason: str | None


def point_views(sweep: SweepDir, glancer: Glancer | None = None, now: float | None = None) -> list[PointView]:
    """All points of the sweep, in their order. ``glancer``: one that is kept reads again only what has changed."""
    now = time.time() if now is None else now
    points = sweep.read_points()
    runs = {point.result_run: sweep.run(point.result_run) for point in points}
    records = (glancer or Glancer(sweep.root)).read_all(run for run in runs.values() if run.path.is_dir())
    views = {view.record.run.run_id: view for view in observe(records, now)}
    life = life_of(sweep)
    waits = stop_reason(life) or life.held_back
    return [_view(point, views.get(point.result_run), waits) for point in points]


def _view(point: SweepPoint, view: RunView | None, waits: str | None) -> PointView:
    if view is None:
        return PointView(point, None, "UNKNOWN", f"the directory of run {point.result_run} is gone")
    life = view.record.life
    if view.state == "PLANNED" and life.job_id is None and life.intent is None:
        return PointView(point, view, HELD_BACK, waits or "waits for room")
    return PointView(point, view, view.state, view.reason)
