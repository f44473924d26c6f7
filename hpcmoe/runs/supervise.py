"""Following runs until they are over, and helping them where Slurm would leave it: the login node's part of the life cycle.

Lifts the hold after a requeue, and submits again what ended although nobody wanted that. Runs under `wait` and `submit --wait`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from hpcmoe.errors import UserError
from hpcmoe.runs.control import LogTail, lift_hold, resume
from hpcmoe.runs.observe import RunView, observe
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import read_record

LOOK_EVERY_S = 1.0  # at the run directory
# At Slurm: often while something is about to happen, then seldom, so that a follower for a night costs the controller nothing.
ASK_FIRST_S, ASK_MOST_S, ASK_GROWTH = 2.0, 30.0, 1.3
MOST_TRIES = 3  # submissions in a row that lead to no step
FORGOTTEN_S = 120.0  # a job that Slurm does not know for so long will not come back

EXIT_CODES = {"COMPLETED": 0, "FAILED": 1, "CANCELLED": 3, "STOPPED": 4, "UNKNOWN": 5}
BY_URGENCY = ("COMPLETED", "CANCELLED", "STOPPED", "UNKNOWN", "FAILED")


def supervise(run: RunDir, say: Callable[[str], None], tail: LogTail | None = None) -> RunView:
    """Block until the run is COMPLETED, FAILED, CANCELLED or STOPPED (or Slurm has forgotten it: UNKNOWN)."""
    return supervise_all([run], say, tail)[0]


def supervise_all(runs: Sequence[RunDir], say: Callable[[str], None], tail: LogTail | None = None) -> list[RunView]:
    """Block until all of ``runs`` are over, asking Slurm about them together; returns their last views, in the same order."""
    follower = {run.run_id: _Follower(run, say) for run in runs}
    ends: dict[str, RunView] = {}
    ask_every = ASK_FIRST_S
    while True:
        still = [run for run in runs if run.run_id not in ends]
        news = False
        for run, now in zip(still, observe([read_record(run) for run in still]), strict=True):
            news |= follower[run.run_id].tell(now)
            if tail is not None:
                tail.pump()
            if not follower[run.run_id].help_on(now):
                ends[run.run_id] = now
        if len(ends) == len(follower):
            return [ends[run.run_id] for run in runs]
        ask_every = ASK_FIRST_S if news else ask_every
        _watch_directories([run for run in still if run.run_id not in ends], ask_every, tail)
        ask_every = min(ASK_MOST_S, ask_every * ASK_GROWTH)


def worst_exit_code(views: Iterable[RunView]) -> int:
    """The exit code of the state that needs a person most: of a sweep's runs one may have FAILED and another be STOPPED."""
    return EXIT_CODES[max((view.state for view in views), key=BY_URGENCY.index, default="COMPLETED")]


class _Follower:
    """What supervising one run must remember between two looks at it."""

    def __init__(self, run: RunDir, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._last_said = ""
        self._unknown_from: float | None = None

    def tell(self, now: RunView) -> bool:
        """Say how the run is, if that is new. True when it was."""
        line = _headline(now)
        new = line != self._last_said
        if new:
            self._say(line)
        self._last_said = line
        return new

    def help_on(self, now: RunView) -> bool:
        """Do for the run what Slurm would leave undone. False when it is over, or nothing more can be done."""
        if now.state == "UNKNOWN" and now.job.reachable:
            self._unknown_from = self._unknown_from or time.monotonic()
        else:
            self._unknown_from = None
        if now.final or (now.state == "STOPPED" and not now.involuntary):
            return False
        if self._unknown_from is not None and time.monotonic() - self._unknown_from > FORGOTTEN_S:
            return False
        if now.state == "STOPPED":
            return _bring_back(self._run, now, self._say)
        if lift_hold(now):
            self._say(f"run {self._run.run_id}: the hold after the requeue is lifted")
        return True


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


def _watch_directories(runs: Sequence[RunDir], seconds: float, tail: LogTail | None) -> None:
    """Sleep until Slurm is due, but wake early when a journal grows: it tells of ends sooner than a poll would."""
    deadline = time.monotonic() + seconds
    sizes = [_size(run) for run in runs]
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(LOOK_EVERY_S, left))
        if tail is not None:
            tail.pump()
        if [_size(run) for run in runs] != sizes:
            return


def _size(run: RunDir) -> int:
    try:
        return run.journal.stat().st_size
    except OSError:
        return -1
