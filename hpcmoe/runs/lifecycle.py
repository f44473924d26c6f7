"""Decisions about a run's life, as pure functions: why an attempt ended, and what follows. Asks nobody, does nothing.

The facts come from hpcmoe.runs.arrive and hpcmoe.runs.depart, which also carry the decision out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpcmoe.runs.story import Attempt

# sbatch's --signal may fire this much early, and Slurm's clock ticks in minutes (man sbatch, --signal).
SIGNAL_EARLY_S = 60.0


class Cause(StrEnum):
    """Why an attempt ended."""

    COMPLETED = "completed"
    FAILED = "failed"  # our own clear error: bad data, bad config; trying again would not help
    STOPPED = "stopped"  # control/stop
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    REQUEUED = "requeued"  # somebody ran `scontrol requeue`
    SIGNALLED = "signalled"  # a stop signal whose sender Slurm does not name
    NODE_FAILURE = "node_failure"
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"  # the ranks' watchdog ended it
    CRASHED = "crashed"
    UNKNOWN = "unknown"


# Endings that nobody outside asked for: only these count against the budget of attempts without progress.
UNPROVOKED = frozenset({Cause.HANG, Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.UNKNOWN})


@dataclass(frozen=True)
class Ending:
    """What is known when the ranks have gone. Times are epoch seconds."""

    now: float
    verdict: str | None  # completed | leave | stopped | failed; None: the ranks left no word
    rc: int  # of srun, or of the worst local rank
    heard: frozenset[str]  # signals the batch shell heard: {"USR1", "TERM"}
    cancel_requested: bool  # `hpcmoe cancel` journalled it
    stop_lead_s: float
    hung: bool = False  # the watchdog left its report
    job_state: str | None = None  # Slurm's base state; None: Slurm could not be asked, or there is no Slurm
    requeueing: bool = False  # Slurm itself is bringing the job back
    preempt_time: float | None = None
    end_time: float | None = None


class Step(StrEnum):
    """What happens next."""

    FINISH = "finish"  # for good, with a state
    COME_BACK = "come_back"  # requeue; where refused, submit a successor
    SLURM_BRINGS_BACK = "slurm_brings_back"  # nothing to do: Slurm has requeued the job already
    REST = "rest"  # stays as it is until `hpcmoe resume`


@dataclass(frozen=True)
class Decision:
    step: Step
    state: str | None = None  # FINISH: COMPLETED | FAILED | CANCELLED; REST: STOPPED
    reason: str | None = None


_VERDICT_CAUSE = {"completed": Cause.COMPLETED, "failed": Cause.FAILED, "stopped": Cause.STOPPED}
_STATE_CAUSE = {
    "CANCELLED": Cause.CANCELLED,
    "PREEMPTED": Cause.PREEMPTED,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "OUT_OF_MEMORY": Cause.OUT_OF_MEMORY,
    "REQUEUED": Cause.REQUEUED,
}


def cause_of(ending: Ending) -> Cause:
    """Why this attempt ended. The ranks' own word comes first, then the user's, then Slurm's, then what was heard."""
    if ending.verdict in _VERDICT_CAUSE:
        return _VERDICT_CAUSE[ending.verdict]
    if ending.cancel_requested:
        return Cause.CANCELLED
    if ending.job_state == "CANCELLED":
        return Cause.CANCELLED
    if ending.preempt_time is not None:
        return Cause.PREEMPTED
    if ending.job_state in _STATE_CAUSE:
        return _STATE_CAUSE[ending.job_state]
    if ending.requeueing:
        return Cause.REQUEUED
    if ending.hung and ending.verdict is None:
        return Cause.HANG
    if "USR1" in ending.heard and _near_the_limit(ending):
        return Cause.TIME_LIMIT
    if ending.verdict == "leave" or ending.heard:
        return Cause.SIGNALLED
    return Cause.CRASHED


def _near_the_limit(ending: Ending) -> bool:
    return ending.end_time is not None and ending.now >= ending.end_time - ending.stop_lead_s - 2 * SIGNAL_EARLY_S


def cause_of_record(slurm_state: str | None, cancel_requested: bool) -> Cause:
    """Why an attempt ended that left no word at all, from Slurm's accounting record of it (None: no record)."""
    if cancel_requested:
        return Cause.CANCELLED
    if slurm_state in _STATE_CAUSE:
        return _STATE_CAUSE[slurm_state]
    return Cause.UNKNOWN if slurm_state is None else Cause.CRASHED


def attempts_without_progress(attempts: Sequence[Attempt]) -> int:
    """How many of the newest attempts ended unprovoked without a new durable checkpoint.

    Preemptions, requeues and time limits after some steps neither count nor reset: they say nothing about the run itself.
    """
    count = 0
    for index in range(len(attempts) - 1, -1, -1):
        attempt = attempts[index]
        earlier = max((a.saved_step or 0 for a in attempts[:index]), default=0)
        if (attempt.saved_step or 0) > earlier:
            break
        if attempt.cause is not None and _own_fault(attempt):
            count += 1
    return count


def _own_fault(attempt: Attempt) -> bool:
    """Also a time limit that came before the first step: the run asks for less time than it needs to start."""
    cause = Cause(attempt.cause or "")
    return cause in UNPROVOKED or (cause is Cause.TIME_LIMIT and attempt.first_step is None)


def give_up_reason(attempts: Sequence[Attempt], most: int) -> str | None:
    """Why the run should not be tried again, or None. ``most``: resilience.max_attempts_without_progress."""
    count = attempts_without_progress(attempts)
    if count < most:
        return None
    last = attempts[-1]
    why = f": {last.detail}" if last.detail else ""
    return f"no progress in {count} attempts, the last one {last.cause}{why}"


def decide(cause: Cause, ending: Ending, give_up: str | None, reason: str | None, scheduler: str) -> Decision:
    """What follows from an attempt's end. ``reason``: the verdict's words; ``scheduler``: slurm | local."""
    match cause:
        case Cause.COMPLETED:
            return Decision(Step.FINISH, "COMPLETED", reason)
        case Cause.FAILED:
            return Decision(Step.FINISH, "FAILED", reason)
        case Cause.CANCELLED:
            return Decision(Step.FINISH, "CANCELLED", "cancelled by its user")
        case Cause.STOPPED:
            return Decision(Step.REST, "STOPPED", reason or "asked to stop by control/stop")
    if give_up is not None:
        return Decision(Step.FINISH, "FAILED", give_up)
    if ending.requeueing:
        return Decision(Step.SLURM_BRINGS_BACK)
    if ending.job_state == "COMPLETING" and cause in (Cause.SIGNALLED, Cause.CRASHED):
        # Slurm is ending the job and does not say for whom (no accounting). It may be a user's cancel, which must stay one.
        return Decision(Step.REST, "STOPPED", "Slurm ended its job, and without accounting nobody can say why")
    if scheduler == "local" and cause is Cause.SIGNALLED:
        return Decision(Step.REST, "STOPPED", "its processes were told to stop by a signal")
    return Decision(Step.COME_BACK)
