"""Why an attempt ended, from what the ranks, the user, the batch shell and Slurm say of it. Pure.

The facts come from hpcmoe.runs.depart and hpcmoe.runs.arrive; what follows from a cause is decided in hpcmoe.runs.lifecycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# sbatch's --signal may fire this much early, and Slurm's clock ticks in minutes (man sbatch, --signal).
SIGNAL_EARLY_S = 60.0


class Cause(StrEnum):
    """Why an attempt ended."""

    COMPLETED = "completed"
    FAILED = "failed"  # our own clear error: bad data, bad config; trying again would not help
    STOPPED = "stopped"  # control/stop
    PAUSED = "paused"  # at a rung of its sweep (hpcmoe.runs.halving)
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


@dataclass(frozen=True)
class Ending:
    """What is known when the ranks have gone. Times are epoch seconds."""

    now: float
    verdict: str | None  # completed | leave | stopped | failed; None: the ranks left no word
    rc: int  # of srun, or of the worst local rank
    heard: frozenset[str]  # signals the batch shell heard: {"USR1", "TERM"}
    cancel_requested: bool  # `hpcmoe cancel` journalled it
    stop_lead_s: float
    source: str | None = None  # of the verdict: what the ranks heard; time_limit: they saw the end coming themselves
    hung: bool = False  # the watchdog left its report
    agreed: bool = True  # all ranks stand behind the verdict; False: it is rank 0's, and holds where all ranks left with 0
    job_state: str | None = None  # Slurm's base state; None: Slurm could not be asked, or there is no Slurm
    requeueing: bool = False  # Slurm itself is bringing the job back
    preempt_time: float | None = None
    end_time: float | None = None


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
    verdict = ending.verdict if ending.agreed or ending.rc == 0 or ending.verdict == "failed" else None
    if verdict == "stopped" and ending.source == "rung":
        return Cause.PAUSED
    if verdict in _VERDICT_CAUSE:
        return _VERDICT_CAUSE[verdict]
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
    if ending.hung and verdict is None:
        return Cause.HANG
    if ending.source == "time_limit":
        return Cause.TIME_LIMIT
    if "USR1" in ending.heard and _near_the_limit(ending):
        return Cause.TIME_LIMIT
    if verdict == "leave" or ending.heard:
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
