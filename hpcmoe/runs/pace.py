"""What happens to a sweep next: what is submitted, how many run at once, when it is stopped. Pure: hpcmoe.runs.advance acts.

The throttle holds for the whole sweep, and Slurm knows only that of each array: so each array has a share of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """``sweep.*`` as far as it decides here."""

    max_failures: int | None = None
    on_max_failures: str = "drain"  # drain | stop


@dataclass(frozen=True)
class Queued:
    """A job of the sweep that Slurm has: an array, or a run's own job. An element that is leaving for good does not count."""

    job_id: str
    left: int  # elements that run, or may
    running: int = 0  # of these, those that run now
    share: int | None = None  # most at once that Slurm was told; None: no bound; 0: held
    array: bool = True

    @property
    def most(self) -> int:
        """So many of it may run at once as things stand."""
        return self.left if self.share is None else max(self.running, min(self.share, self.left))


@dataclass(frozen=True)
class Facts:
    """A sweep as it stands."""

    queued: tuple[Queued, ...] = ()
    waiting: tuple[tuple[int, ...], ...] = ()  # points that are held back, by the shape of their jobs
    throttle: int | None = None  # most runs at once; None: no bound
    room: int | None = None  # jobs that the user may submit beside those they have; None: not known
    room_of: int | None = None  # of how many in all
    most: int = 1000  # elements that an array may have
    failures: int = 0  # runs that FAILED
    stopped: bool = False
    leaving: bool = False  # asked by an element that leaves for good; what it submits waits for its end


@dataclass(frozen=True)
class SetShare:
    job_id: str
    share: int | None


@dataclass(frozen=True)
class Submit:
    points: tuple[int, ...]
    share: int | None = None


@dataclass(frozen=True)
class Stop:
    """Start no more; ``running``: those that run save and stop, too."""

    reason: str
    running: bool


Action = SetShare | Submit | Stop


def decide(policy: Policy, facts: Facts) -> tuple[Action, ...]:
    """What to do now. At no moment do more than ``throttle`` runs go at once because of it."""
    if not facts.stopped and policy.max_failures is not None and facts.failures > policy.max_failures:
        reason = f"{facts.failures} failed runs are more than sweep.max_failures={policy.max_failures}"
        return (Stop(reason, running=policy.on_max_failures == "stop"),)
    batches = [] if facts.stopped else _batches(facts)
    if facts.throttle is None:
        free = tuple(SetShare(job.job_id, None) for job in facts.queued if job.share is not None)
        return free + tuple(Submit(batch) for batch in batches)
    return _throttled(facts, facts.throttle, batches)


def _batches(facts: Facts) -> list[tuple[int, ...]]:
    """Jobs to be, as far as there is room. Not a job for every single place that becomes free, unless nothing else waits."""
    waiting = sum(map(len, facts.waiting))
    pending = sum(job.left - job.running for job in facts.queued)
    room = waiting if facts.room is None else facts.room
    worth_it = 1 if pending == 0 or facts.room_of is None else max(1, facts.room_of // 10)
    if room < min(waiting, worth_it):
        return []
    batches: list[tuple[int, ...]] = []
    for points in facts.waiting:
        for first in range(0, len(points), facts.most):
            batch = points[first : first + facts.most][:room]
            room -= len(batch)
            if batch:
                batches.append(batch)
    return batches


def _throttled(facts: Facts, throttle: int, batches: Sequence[tuple[int, ...]]) -> tuple[Action, ...]:
    """First lower shares, then give what that leaves: what runs already counts until it has ended."""
    jobs = facts.queued
    targets = spread(throttle, [job.left for job in jobs] + [len(batch) for batch in batches])
    most = [max(job.running, min(job.most, target)) for job, target in zip(jobs, targets, strict=False)]
    for i in reversed(range(len(jobs))):  # one that runs more than its share keeps the others waiting until it has drained
        most[i] -= min(max(0, sum(most) - throttle), most[i] - jobs[i].running)
    free, alone = throttle - sum(most), len(targets) == 1  # one array that is alone may have all of it
    actions: list[Action] = []
    for job, now, target in zip(jobs, most, targets, strict=False):
        # what an element that is still leaving holds is not given to those that would not wait for its end
        more = min(target - now, free - facts.leaving) if target > now and free > facts.leaving else 0
        free -= more
        share = min(target, now + more)
        if _matters(job, share):
            actions.append(SetShare(job.job_id, share))
    for batch, target in zip(batches, targets[len(jobs) :], strict=True):
        share = free if alone else min(target, free)
        if share > 0:
            actions.append(Submit(batch, share))
            free -= share
    return tuple(actions)


def _matters(job: Queued, share: int) -> bool:
    """It makes a difference to what may run; a run's own job that runs already cannot be held."""
    told = job.left if job.share is None else min(job.share, job.left)
    return min(share, job.left) != told and (job.array or job.running < job.left)


def spread(total: int, most: Sequence[int]) -> list[int]:
    """``total`` over some jobs, no more than ``most`` to each: one to each in turn as far as it goes, then as evenly as that."""
    shares = [0] * len(most)
    while (open_jobs := [i for i, cap in enumerate(most) if shares[i] < cap]) and total > 0:
        each = max(1, math.floor(total / len(open_jobs)))
        for i in open_jobs:
            given = min(each, most[i] - shares[i], total)
            shares[i] += given
            total -= given
    return shares
