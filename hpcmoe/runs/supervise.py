"""Following a run until it is over, and helping it where Slurm would leave it: the login node's part of the life cycle.

Lifts the hold after a requeue, and submits again what ended although nobody wanted that. Runs under `wait` and `submit --wait`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcmoe.errors import UserError
from hpcmoe.runs.control import LogTail, lift_hold, resume, see
from hpcmoe.runs.observe import RunView
from hpcmoe.runs.rundir import RunDir

LOOK_EVERY_S = 1.0  # at the run directory
# At Slurm: often while something is about to happen, then seldom, so that a follower for a night costs the controller nothing.
ASK_FIRST_S, ASK_MOST_S, ASK_GROWTH = 2.0, 30.0, 1.3
MOST_TRIES = 3  # submissions in a row that lead to no step
FORGOTTEN_S = 120.0  # a job that Slurm does not know for so long will not come back

EXIT_CODES = {"COMPLETED": 0, "FAILED": 1, "CANCELLED": 3, "STOPPED": 4, "UNKNOWN": 5}


def supervise(run: RunDir, say: Callable[[str], None], tail: LogTail | None = None) -> RunView:
    """Block until the run is COMPLETED, FAILED, CANCELLED or STOPPED (or Slurm has forgotten it: UNKNOWN)."""
    last_said, ask_every, unknown_from = "", ASK_FIRST_S, None
    while True:
        now = see(run)
        if (line := _headline(now)) != last_said:
            say(line)
            last_said, ask_every = line, ASK_FIRST_S
        if tail is not None:
            tail.pump()
        if now.state == "UNKNOWN" and now.job.reachable:
            unknown_from = unknown_from or time.monotonic()
        else:
            unknown_from = None
        if now.final or (now.state == "STOPPED" and not now.involuntary):
            return now
        if unknown_from is not None and time.monotonic() - unknown_from > FORGOTTEN_S:
            return now
        if now.state == "STOPPED":
            if not _bring_back(run, now, say):
                return now
        elif lift_hold(now):
            say(f"run {run.run_id}: the hold after the requeue is lifted")
        _watch_directory(run, ask_every, tail)
        ask_every = min(ASK_MOST_S, ask_every * ASK_GROWTH)


def _headline(now: RunView) -> str:
    record = now.record
    job = f" (job {record.job_id})" if record.job_id else ""
    reason = f": {now.reason}" if now.reason and now.reason != "None" else ""
    return f"run {record.run.run_id} is {now.state}{job}{reason}"


def _bring_back(run: RunDir, now: RunView, say: Callable[[str], None]) -> bool:
    tries = now.record.supervisor_tries
    if tries >= MOST_TRIES:
        say(f"run {run.run_id} stopped ({now.reason}); {tries} submissions led to no step, so it is left for you to look at")
        return False
    try:
        job_id = resume(run, how="supervisor")
    except UserError as error:
        say(f"run {run.run_id} stopped ({now.reason}) and cannot be brought back: {error}")
        return False
    say(f"run {run.run_id} stopped ({now.reason}); submitted again as job {job_id}")
    return True


def _watch_directory(run: RunDir, seconds: float, tail: LogTail | None) -> None:
    """Sleep until Slurm is due, but wake early when the journal grows: it tells of ends sooner than a poll would."""
    deadline = time.monotonic() + seconds
    size = _size(run)
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(LOOK_EVERY_S, left))
        if tail is not None:
            tail.pump()
        if _size(run) != size:
            return


def _size(run: RunDir) -> int:
    try:
        return run.journal.stat().st_size
    except OSError:
        return -1
