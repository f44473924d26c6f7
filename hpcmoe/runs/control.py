"""What a user does to a run: cancel it, resume it. Journals first, then acts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcmoe.errors import UserError
from hpcmoe.runs.arrive import close_silent_attempts
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.observe import RunView, observe
from hpcmoe.runs.place import local_pid
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import finish, read_record, reopen
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError

CANCEL_POLL_S = 0.5
# Beyond KillWait: epilogs and a slow controller.
CANCEL_SLACK_S = 60.0
DEFAULT_KILL_WAIT_S = 30.0
SOON_S = 15.0


def see(run: RunDir) -> RunView:
    """The run's state now."""
    return observe([read_record(run)])[0]


def cancel(run: RunDir) -> RunView:
    """End the run for good, and return when its job is gone. A save that fits into Slurm's KillWait still happens."""
    before = see(run)
    if before.final:
        raise UserError(f"run {run.run_id} is {before.state} already; there is nothing to cancel")
    if not before.job.reachable:
        raise UserError(f"run {run.run_id} is not cancelled: {before.job.problem}; try again")
    Journal(run.journal).append("cancel_requested", by=os.environ.get("USER"), job_id=before.record.job_id)
    # Only a job that Slurm lists as this run's: a forgotten id may by now be another job's.
    if before.state in ("QUEUED", "RUNNING") and before.record.job_id is not None:
        _end_job(before.record.job_id)
        _wait_until_gone(run)
    if read_record(run).finished is None:
        close_silent_attempts(run, None)
        finish(run, "CANCELLED", "cancelled by its user")
    return see(run)


def _end_job(job_id: str) -> None:
    if job_id.startswith("local-"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(local_pid(job_id), signal.SIGTERM)
        return
    try:
        client.cancel([job_id])
    except SlurmError as error:
        raise UserError(f"Slurm did not take the cancellation of job {job_id}: {error}; try again") from error


def _wait_until_gone(run: RunDir) -> None:
    """Until the job has ended, but no longer than Slurm could possibly take."""
    deadline = time.monotonic() + _kill_wait_s() + CANCEL_SLACK_S
    while time.monotonic() < deadline:
        now = see(run)
        if now.record.finished is not None and now.job.state != "RUNNING":
            return
        if now.state not in ("QUEUED", "RUNNING", "UNKNOWN"):
            return
        time.sleep(CANCEL_POLL_S)
    raise UserError(
        f"job of run {run.run_id} is still there after {CANCEL_SLACK_S:.0f} s beyond KillWait; the cancellation stands"
    )


def _kill_wait_s() -> float:
    try:
        return client.cluster_facts().kill_wait_s or DEFAULT_KILL_WAIT_S
    except SlurmError:
        return DEFAULT_KILL_WAIT_S


def resume(run: RunDir, how: str = "resume") -> str:
    """Submit the run again from its newest checkpoint; returns the job id. ``how`` = "supervisor" keeps the crash budget."""
    from hpcmoe.config.freeze import load_frozen
    from hpcmoe.runs.create import submit_run

    now = see(run)
    if now.state == "COMPLETED":
        raise UserError(f"run {run.run_id} is COMPLETED; there is nothing to resume")
    if not now.resumable:
        raise UserError(f"run {run.run_id} is {now.state} (job {now.record.job_id}); there is nothing to resume")
    close_silent_attempts(run, None)
    with _reopened(run):
        return submit_run(run, load_frozen(run.config), how=how)


@contextlib.contextmanager
def _reopened(run: RunDir) -> Iterator[None]:
    """Take the old result and the stop file out of the way; put the result back if the submission fails."""
    result = run.result.read_text(encoding="utf-8") if run.result.exists() else None
    reopen(run)
    try:
        yield
    except BaseException:
        if result is not None:
            run.result.write_text(result, encoding="utf-8")
        raise


def lift_hold(view: RunView) -> bool:
    """Start a requeued job soon instead of after Slurm's credential lifetime. True when Slurm took it."""
    if view.job.state not in ("PENDING", "REQUEUED") or view.job.reason != "BeginTime" or view.record.job_id is None:
        return False
    if not any(event["event"] == "requeued" for event in view.record.events[-20:]):
        return False  # the user's own --begin
    if view.job.start is not None and view.job.start - time.time() < SOON_S:
        return False  # lifted already; to ask again would put the start off again
    with contextlib.suppress(SlurmError):
        return client.start_soon(view.record.job_id)
    return False


class LogTail:
    """Follows one rank's log through all attempts. ``emit`` gets text; each attempt is announced by a line of its own."""

    def __init__(self, run: RunDir, rank: int, emit: Callable[[str], None]) -> None:
        self.run, self.rank, self.emit = run, rank, emit
        self._offsets: dict[str, int] = {}

    def pump(self) -> bool:
        """Emit what is new. True when there was something."""
        any_new = False
        for attempt in read_record(self.run).attempts:
            path = self.run.rank_log(attempt.attempt, self.rank)
            if not path.exists():
                continue
            if attempt.attempt not in self._offsets:
                hosts = ",".join(attempt.hosts[:4]) + (",..." if len(attempt.hosts) > 4 else "")
                self.emit(f"--- attempt {attempt.attempt} on {hosts} (rank {self.rank}) ---\n")
            any_new |= self._read(attempt.attempt, path)
        return any_new

    def _read(self, attempt: str, path: Path) -> bool:
        offset = self._offsets.get(attempt, 0)
        with path.open("rb") as file:
            file.seek(offset)
            chunk = file.read()
        whole = chunk.rfind(b"\n") + 1
        self._offsets[attempt] = offset + whole
        if whole:
            self.emit(chunk[:whole].decode("utf-8", errors="replace"))
        return bool(whole)
