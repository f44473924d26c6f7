"""Where a sweep stands, folded from its events: which points wait, which jobs it has, what was asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcmoe.runs.journal import Event
from hpcmoe.runs.sweep import SweepDir, SweepPoint


@dataclass(frozen=True)
class SweepJob:
    """A job that was submitted for the sweep: an array of points, or one point's own job."""

    job_id: str
    points: tuple[int, ...]  # element N is the Nth


@dataclass(frozen=True)
class SweepLife:
    """Where a sweep stands, by its events alone."""

    jobs: tuple[SweepJob, ...] = ()
    shares: dict[str, int | None] = field(default_factory=dict)  # most at once that Slurm was told; None: no bound; 0: held
    taken: frozenset[int] = frozenset()  # points that were submitted, by the sweep or by their user
    parts: int = 0  # submissions begun so far; numbers them
    throttle: int | None = None  # most runs at once; None: no bound
    stopped: Event | None = None  # failures, or a user's cancel: nothing more is submitted until a resume
    intent: Event | None = None  # a submission that was begun, and nobody has written what became of it
    held_back: str | None = None  # why the points that wait do, as it was said last
    refused_at: float = 0.0  # epoch s: Slurm refused a submission for good reason last
    refusals: int = 0  # in a row
    resumed_at: float = 0.0  # epoch s: the last resume
    resumed: frozenset[int] = field(default_factory=frozenset)  # points that wait to be submitted again, as their user asked
    promoted: frozenset[int] = field(default_factory=frozenset)  # and those that had paused at a rung

    def carriers(self) -> dict[int, str]:
        """By point: the job id of the element in which it was submitted last."""
        return {
            index: f"{job.job_id}_{task}" if len(job.points) > 1 else job.job_id
            for job in self.jobs
            for task, index in enumerate(job.points)
        }

    def waiting(self, points: Iterable[SweepPoint]) -> list[SweepPoint]:
        """Points whose run waits to be submitted: those that were promoted, then the others in their order."""
        found = [point for point in points if point.run_id is not None and point.index not in self.taken]
        return sorted(found, key=lambda point: point.index not in self.promoted)


def fold_sweep(events: Iterable[Event], throttle: int | None) -> SweepLife:
    """The state after these events. ``throttle``: what the sweep was submitted with."""
    life = SweepLife(throttle=throttle)
    for event in events:
        life = _step(life, event)
    return life


def life_of(sweep: SweepDir) -> SweepLife:
    """Where the sweep stands now."""
    given = sweep.policy.get("throttle")
    return fold_sweep(sweep.read_events(), None if given is None else int(given))


def anything_to_do(sweep: SweepDir) -> bool:
    """Without asking anybody. Most sweeps are whole in the queue, or over."""
    life = life_of(sweep)
    if (
        life.intent is not None
        or sweep.policy.get("max_failures") is not None
        or stops_early(sweep.policy)
        or life.waiting(sweep.read_points())
    ):
        return True
    if life.throttle is None:
        return any(share is not None for share in life.shares.values())
    return bool(life.jobs)  # beside one array, too, runs may have come back in jobs of their own


def stops_early(policy: Mapping[str, Any]) -> bool:
    """Does the sweep pause runs at rungs?"""
    return (policy.get("halving") or {}).get("first_rung") is not None


def _step(life: SweepLife, event: Event) -> SweepLife:
    """Unknown events change nothing."""
    match event["event"]:
        case "submitting":  # of two at once the first counts
            return replace(life, parts=life.parts + 1, intent=life.intent or event)
        case "not_submitted":
            refused = not event.get("room") and not event.get("lost")
            return replace(
                life,
                intent=_resolved(life, event, lost=bool(event.get("lost"))),
                refused_at=float(event["t"]) if refused else life.refused_at,
                refusals=life.refusals + refused,
            )
        case "array_submitted":
            points = _points(event)
            job = SweepJob(str(event["job_id"]), points)
            return replace(
                life,
                jobs=(*life.jobs, job),
                shares={**life.shares, job.job_id: event.get("share")},
                taken=life.taken | set(points),
                resumed=life.resumed - set(points),
                promoted=life.promoted - set(points),
                intent=_resolved(life, event),
                held_back=None,
                refusals=0,
            )
        case "submitted_elsewhere":
            gone = set(_points(event))
            return replace(life, taken=life.taken | gone, resumed=life.resumed - gone, promoted=life.promoted - gone)
        case "promoted":
            again = set(_points(event))
            return replace(life, taken=life.taken - again, promoted=life.promoted | again)
        case "share":
            return replace(life, shares={**life.shares, str(event["job_id"]): event["to"]})
        case "throttle":
            return replace(life, throttle=event["to"])
        case "held_back":
            return replace(life, held_back=str(event["reason"]))
        case "stopped" | "cancelled":
            return replace(life, stopped=event)
        case "resumed":
            again = set(_points(event))
            at, waiting = float(event["t"]), life.resumed | again
            return replace(life, taken=life.taken - again, resumed=waiting, resumed_at=at, stopped=None, refusals=0)
    return life


def _points(event: Event) -> tuple[int, ...]:
    return tuple(int(index) for index in event.get("points") or ())


def _resolved(life: SweepLife, event: Event, lost: bool = False) -> Event | None:
    """The open intent after this outcome; another submission's outcome leaves it. ``lost``: it stays, to be looked for."""
    if life.intent is None or event.get("token") != life.intent.get("token"):
        return life.intent
    return {**life.intent, "abandoned": True} if lost else None


def grouped(points: Sequence[SweepPoint]) -> list[list[SweepPoint]]:
    """Points that may share an array, in the order of their first ones."""
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        groups.setdefault(point.shape, []).append(point)
    return list(groups.values())


def stop_reason(life: SweepLife) -> str | None:
    """Why nothing more is submitted; None: something may be."""
    if life.stopped is None:
        return None
    told: Any = life.stopped.get("reason")
    return "the sweep is cancelled" if life.stopped["event"] == "cancelled" else f"the sweep is stopped: {told}"
