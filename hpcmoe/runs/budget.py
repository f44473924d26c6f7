"""What a run may still use up: attempts by cause, and GPU-hours over all of them. Pure: counts attempts, asks nobody.

Each budget is a key of ``resilience``; ``hpcmoe resume`` gives new ones, but for GPU-hours: they count over the run's whole life.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hpcmoe.runs.ending import Cause
from hpcmoe.runs.journal import Event
from hpcmoe.runs.lead import next_lead_s
from hpcmoe.runs.story import HOUR_S, Attempt
from hpcmoe.slurm.parse import format_duration, parse_duration

# Endings that nobody outside asked for: only these count against the budget of attempts without progress.
UNPROVOKED = frozenset({Cause.HANG, Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.UNKNOWN})
LONGEST_BACKOFF_S = 3600.0
# With less than this beyond its lead, an attempt would only start and save.
LEAST_WORK_S = 60.0


@dataclass(frozen=True)
class Budgets:
    """The keys of ``resilience`` that bound a run. None: no bound."""

    max_attempts_without_progress: int = 3
    max_failures: int | None = None
    max_node_failures: int | None = None
    max_time_limits: int | None = None
    max_preemptions_per_hour: int | None = None
    failure_backoff_s: float = 0.0
    max_gpu_hours: float | None = None
    stop_lead_s: float = 0.0


def budgets_of(config: Mapping[str, Any], max_gpu_hours: float | None = None, events: Sequence[Event] = ()) -> Budgets:
    """From a frozen config, which may be older than some of the keys. ``max_gpu_hours``: what a later resume raised it to;
    ``events``: the run's, for resilience.stop_lead_s=auto.
    """
    given = config["resilience"]
    budgets = {field.name: given[field.name] for field in fields(Budgets) if field.name in given}
    if "stop_lead_s" in budgets:
        budgets["stop_lead_s"] = next_lead_s(budgets["stop_lead_s"], events)
    return Budgets(**budgets | ({} if max_gpu_hours is None else {"max_gpu_hours": max_gpu_hours}))


def attempts_without_progress(attempts: Sequence[Attempt]) -> int:
    """How many of the newest attempts ended unprovoked without a new durable checkpoint.

    Preemptions, requeues and time limits after some steps neither count nor reset: they say nothing about the run itself.
    """
    count = 0
    for index in range(len(attempts) - 1, -1, -1):
        attempt = attempts[index]
        earlier = max((a.saved_step or 0 for a in attempts[:index]), default=0)
        if (attempt.saved_step or 0) > earlier or attempt.progressed:
            break
        if attempt.cause is not None and _own_fault(attempt):
            count += 1
    return count


def _own_fault(attempt: Attempt) -> bool:
    """Also a time limit that came before the first step: the run asks for less time than it needs to start.

    Of a command nobody may have seen the steps.
    """
    cause = Cause(attempt.cause or "")
    too_short = cause is Cause.TIME_LIMIT and attempt.first_step is None and attempt.engine != "command"
    return cause in UNPROVOKED or too_short


def give_up_reason(attempts: Sequence[Attempt], most: int | Budgets) -> str | None:
    """Why the run should not be tried again, or None. ``attempts``: those since the user's last resume.

    ``most``: the budgets; a number is resilience.max_attempts_without_progress alone.
    """
    budgets = most if isinstance(most, Budgets) else Budgets(max_attempts_without_progress=most)
    if not attempts:
        return None
    why = f", the last one {attempts[-1].cause}" + (f": {attempts[-1].detail}" if attempts[-1].detail else "")
    count = attempts_without_progress(attempts)
    if count >= budgets.max_attempts_without_progress:
        return f"no progress in {count} attempts{why}"
    ends = [Cause(attempt.cause) for attempt in attempts if attempt.cause is not None]
    bounds = [
        ("max_failures", sum(cause in UNPROVOKED for cause in ends), budgets.max_failures, "failures of its own"),
        ("max_node_failures", ends.count(Cause.NODE_FAILURE), budgets.max_node_failures, "node failures"),
        ("max_time_limits", ends.count(Cause.TIME_LIMIT), budgets.max_time_limits, "time limits"),
    ]
    for key, used, bound, words in bounds:
        if bound is not None and used > bound:
            return f"{used} {words} are more than resilience.{key}={bound}{why}"
    return None


def not_before(attempts: Sequence[Attempt], budgets: Budgets, now: float) -> float | None:
    """Epoch seconds (after ``now``) before which the run should not start again: after failures, and when preemptions come thick.

    One failure is taken for bad luck; each further one without progress doubles the wait. The start after more than
    max_preemptions_per_hour preemptions in an hour waits until that hour is over.
    """
    ended = [attempt for attempt in attempts if attempt.ended is not None]
    until = _after_failures(attempts, ended, budgets) or _after_preemptions(ended, budgets)
    return until if until is not None and until > now else None


def _after_failures(attempts: Sequence[Attempt], ended: Sequence[Attempt], budgets: Budgets) -> float | None:
    failures = attempts_without_progress(attempts)
    if not ended or Cause(ended[-1].cause or Cause.UNKNOWN) not in UNPROVOKED or failures < 2:
        return None
    wait = min(LONGEST_BACKOFF_S, budgets.failure_backoff_s * 2.0 ** (failures - 2))
    return (ended[-1].ended or 0.0) + wait if wait > 0 else None


def _after_preemptions(ended: Sequence[Attempt], budgets: Budgets) -> float | None:
    most = budgets.max_preemptions_per_hour
    preempted = [attempt.ended or 0.0 for attempt in ended if attempt.cause == Cause.PREEMPTED]
    if most is None or len(preempted) <= most or ended[-1].cause != Cause.PREEMPTED:
        return None
    oldest = preempted[-most - 1]
    return oldest + HOUR_S if preempted[-1] - oldest < HOUR_S else None


def gpu_hours(attempts: Sequence[Attempt], now: float) -> float:
    """GPU-hours of all attempts, up to ``now`` for one that still runs."""
    return sum(attempt.gpu_hours(now) for attempt in attempts)


def spent_reason(attempts: Sequence[Attempt], budgets: Budgets, now: float, gpus: int) -> str | None:
    """Why no further attempt on ``gpus`` GPUs may start, when the GPU-hours are used up; None when one may."""
    left = seconds_left(attempts, budgets, now, gpus)
    if left is None or left >= budgets.stop_lead_s + LEAST_WORK_S:
        return None
    ceiling = f"resilience.max_gpu_hours={budgets.max_gpu_hours:g}"
    return f"{gpu_hours(attempts, now):.2f} GPU-hours are used, and {ceiling} leaves no room for another attempt"


def seconds_left(attempts: Sequence[Attempt], budgets: Budgets, now: float, gpus: int) -> float | None:
    """How long an attempt on ``gpus`` GPUs may last under the ceiling; None: there is none, or nothing counts (no GPUs)."""
    if budgets.max_gpu_hours is None or gpus <= 0:
        return None
    return max(0.0, budgets.max_gpu_hours - gpu_hours(attempts, now)) * HOUR_S / gpus


def time_flag(left_s: float | None, limit: str | None) -> list[str]:
    """sbatch's flag for an attempt that may last ``left_s``; none where its time limit (in Slurm's words) is shorter already."""
    own = None if limit is None else parse_duration(limit)
    return [] if left_s is None or (own is not None and own <= left_s) else [f"--time={format_duration(left_s)}"]
