"""Which paused runs of a sweep are promoted now: what its runs say, put to hpcmoe.runs.halving. Reads; acts on nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpcmoe.runs.halving import Course, Promotion, Whereabouts, promotions
from hpcmoe.runs.life import Life
from hpcmoe.runs.rungs import read_rungs, told_by, with_told
from hpcmoe.runs.store import read_record
from hpcmoe.runs.sweep import SweepDir, SweepPoint
from hpcmoe.runs.sweep_life import stops_early


def due_promotions(sweep: SweepDir, points: Sequence[SweepPoint], waiting: Collection[int]) -> list[tuple[SweepPoint, Promotion]]:
    """``waiting``: points that are to be submitted already."""
    if not stops_early(sweep.policy):
        return []
    halving = sweep.policy["halving"]
    own = {p.run_id: p for p in points if p.run_id is not None and sweep.run(p.run_id).journal.exists()}
    records = {run_id: read_record(sweep.run(run_id)) for run_id in own}
    runs = {run_id: whereabouts(record.life, own[run_id].index in waiting) for run_id, record in records.items()}
    told = [one for run_id, record in records.items() for one in told_by(run_id, record.events)]
    found = promotions(with_told(read_rungs(sweep.path), told), runs, halving["eta"], halving["mode"])
    return [(own[one.run_id], one) for one in found]


def whereabouts(life: Life, waits: bool) -> Whereabouts:
    """``waits``: its sweep is to submit it, or to submit it again.

    A run that died and was not brought back yet is expected to come: who looks after it will tell what becomes of it.
    """
    if waits and not life.finished:
        return Whereabouts(Course.COMING)
    if life.cancel_requested:
        return Whereabouts(Course.GONE)
    if life.paused_at is not None:
        return Whereabouts(Course.PAUSED, life.paused_at)
    if life.ended is None:
        return Whereabouts(Course.COMING)
    return Whereabouts(Course.DONE if life.ended["state"] == "COMPLETED" else Course.GONE)
