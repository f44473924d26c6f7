"""Slurm's job states: which are alive, which are ends. Pure; an unknown word is UNKNOWN, never a success."""

from __future__ import annotations

# squeue(1), JOB STATE CODES. Each of these may still run, or run again.
ALIVE = frozenset(
    {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
    | {"REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
# PREEMPTED and NODE_FAIL are ends of one start; the job may come back under the same id, and squeue then says so.
ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"}
)
UNKNOWN = "UNKNOWN"


def base_state(word: str) -> str:
    """Slurm's state word without decoration: ``CANCELLED by 0`` and ``CANCELLED+`` are CANCELLED; a new word is UNKNOWN."""
    parts = word.split()
    state = parts[0].rstrip("+").upper() if parts else ""
    return state if state in ALIVE or state in ENDED else UNKNOWN


def is_alive(state: str) -> bool:
    """The job is queued, running, leaving or coming back. False for ends and for UNKNOWN alike: ask is_ended for ends."""
    return base_state(state) in ALIVE


def is_ended(state: str) -> bool:
    """The job is known to be over. False for UNKNOWN."""
    return base_state(state) in ENDED
