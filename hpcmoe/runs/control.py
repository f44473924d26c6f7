"""What a user does to runs: cancel them, resume them. Journals first, then acts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpcmoe.errors import UserError
from hpcmoe.runs.arrive import close_silent_attempts
from hpcmoe.runs.claim import holder
from hpcmoe.runs.elsewhere import still_beats
from hpcmoe.runs.journal import Event, Journal, read_journal
from hpcmoe.runs.life import JobView, standing
from hpcmoe.runs.observe import RunView, observe
from hpcmoe.runs.place import local_pid
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import finish, read_record, reopen
from hpcmoe.runs.submission import being_submitted, submission_lock
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.parse import compress_hostlist
from hpcmoe.slurm.states import is_ended

CANCEL_POLL_S, CANCEL_POLL_MOST_S = 0.5, 5.0
MOST_AT_ONCE = 500  # job ids in one scancel: a command line has its bounds
# Beyond KillWait: epilogs and a slow controller.
CANCEL_SLACK_S = 60.0
DEFAULT_KILL_WAIT_S = 30.0
LOCK_WAIT_S = 30.0  # for another process that submits this run


def see(run: RunDir) -> RunView:
    """The run's state now."""
    return observe([read_record(run)])[0]


def cancel(run: RunDir) -> RunView:
    """End the run for good, and return when its job is gone. A save that fits into Slurm's KillWait still happens."""
    before = see(run)
    if before.final:
        raise UserError(f"run {run.run_id} is {before.state} already; there is nothing to cancel")
    return cancel_all([run])[0]


def cancel_all(runs: Sequence[RunDir]) -> list[RunView]:
    """The same for many runs, with one scancel for all of them; those that are over stay as they are.

    Raises UserError, with no run touched, where Slurm cannot be asked; and where jobs do not end in time.
    """
    before = [view for view in _seen(runs) if not view.final]
    going = [view.record.run for view in before]
    had_jobs = {view.record.job_id for view in before if view.state in ("QUEUED", "RUNNING")}
    for run in going:
        with submission_lock(run, LOCK_WAIT_S):  # so that a job that is being submitted is cancelled, too
            Journal(run.journal).append("cancel_requested", by=os.environ.get("USER"), job_id=read_record(run).job_id)
    # Only jobs that Slurm lists as these runs', or will in a moment: a forgotten id may by now be another job's.
    there = [view for view in _seen(going, requested=True) if _has_job(view, had_jobs)]
    _end_jobs([view.record.job_id for view in there if view.record.job_id is not None])
    _wait_until_gone([view.record.run for view in there])
    for run in going:
        if not read_record(run).life.finished:
            close_silent_attempts(run, None)
            finish(run, "CANCELLED", "cancelled by its user")
    return observe([read_record(run) for run in runs])


def _has_job(view: RunView, had_jobs: Collection[str | None]) -> bool:
    """One to end, though its run counts as cancelled as soon as that is asked for: Slurm may not list a new job yet."""
    if view.state in ("QUEUED", "RUNNING"):
        return True
    if view.record.finished is not None:
        return False
    if view.record.job_id in had_jobs and not is_ended(view.job.state or "UNKNOWN"):
        return True
    return standing(replace(view.record.life, cancel_requested=False), view.job, time.time()).state == "QUEUED"


def _seen(runs: Sequence[RunDir], requested: bool = False) -> list[RunView]:
    """Raises UserError where Slurm cannot be asked, and for local runs of another host: a process id means another one here.

    ``requested``: their cancellation is in the journal.
    """
    views = observe([read_record(run) for run in runs])
    what = "run {} is not cancelled" if not requested else "the cancellation of run {} stands, but its job was not ended"
    for seen in views:
        if seen.job.host is not None:
            run = seen.record.run
            how = f"cancel it there, or have it stop with `touch {run.control / 'stop'}`"
            raise UserError(f"{what.format(run.run_id)}: {_where(seen)}; {how}")
    blind = next((view for view in views if not view.job.reachable), None)
    if blind is not None:
        raise UserError(f"{what.format(blind.record.run.run_id)}: {blind.job.problem}; try again")
    return views


def _end_jobs(job_ids: Sequence[str]) -> None:
    for job_id in job_ids:
        if job_id.startswith("local-"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(local_pid(job_id), signal.SIGTERM)
    slurms = [job_id for job_id in job_ids if not job_id.startswith("local-")]
    for first in range(0, len(slurms), MOST_AT_ONCE):
        some = slurms[first : first + MOST_AT_ONCE]
        try:
            client.cancel(some)
        except SlurmError as error:
            raise UserError(f"Slurm did not take the cancellation of {_jobs(some)}: {error}; try again") from error


def _jobs(job_ids: Sequence[str]) -> str:
    return f"job {job_ids[0]}" if len(job_ids) == 1 else f"{len(job_ids)} jobs"


def _wait_until_gone(runs: Sequence[RunDir]) -> None:
    """Until their jobs have ended, but no longer than Slurm could possibly take."""
    deadline = time.monotonic() + _kill_wait_s() + CANCEL_SLACK_S if runs else 0.0
    still, pause = list(runs), CANCEL_POLL_S
    while still:
        still = [view.record.run for view in observe([read_record(run) for run in still]) if _is_there(view)]
        if still and time.monotonic() > deadline:
            which = f"job of run {still[0].run_id} is" if len(still) == 1 else f"jobs of {len(still)} runs are"
            raise UserError(f"{which} still there after {CANCEL_SLACK_S:.0f} s beyond KillWait; the cancellation stands")
        if still:
            time.sleep(pause)
            pause = min(CANCEL_POLL_MOST_S, 1.3 * pause)


def _is_there(view: RunView) -> bool:
    if view.record.finished is not None and view.job.state != "RUNNING":
        return False
    return view.state in ("QUEUED", "RUNNING", "UNKNOWN")


def _kill_wait_s() -> float:
    try:
        return client.cluster_facts().kill_wait_s or DEFAULT_KILL_WAIT_S
    except SlurmError:
        return DEFAULT_KILL_WAIT_S


def resume(run: RunDir, max_gpu_hours: float | None = None, take_over: bool = False) -> str:
    """Submit the run again from its newest checkpoint, as its user wants it; returns the job id.

    ``max_gpu_hours``: a new ceiling over all attempts. Counts of failures start anew. ``take_over``: the user knows that its
    processes on another host are gone.
    """
    from hpcmoe.config.freeze import load_frozen
    from hpcmoe.runs.create import being_submitted_text, submit_run

    with submission_lock(run, LOCK_WAIT_S) as mine:
        now = see(run)
        if now.state == "COMPLETED":
            raise UserError(f"run {run.run_id} is COMPLETED; there is nothing to resume")
        if now.job.host is not None and not take_over and not now.job.gone:
            cure = f"if they are gone, `hpcmoe resume {run.run_id} --take-over` continues it here"
            raise UserError(f"run {run.run_id} is not resumed: {_where(now)}; stop it there; {cure}")
        if not now.resumable and not (take_over and now.job.host is not None):
            raise UserError(f"run {run.run_id} is {now.state} (job {now.record.job_id}); there is nothing to resume")
        if not mine or being_submitted(now.record.life, now.job, time.time()):
            raise UserError(being_submitted_text(run))
        token = now.record.life.token(run.run_id)
        if now.job.host is not None and now.record.finished is None:
            attempts = _attempts_elsewhere(run, now)
            if not now.job.gone and still_beats(run, attempts):
                cure = f"stop it there, or with `touch {run.control / 'stop'}`"
                raise UserError(f"run {run.run_id} is not taken over: its heartbeats from {now.job.host} go on; {cure}")
            Journal(run.journal).append("taken_over", job_id=now.record.job_id, host=now.job.host, attempts=attempts)
        close_silent_attempts(run, None)
        if max_gpu_hours is not None:
            Journal(run.journal).append("budget_raised", max_gpu_hours=max_gpu_hours)
        with _reopened(run):
            cfg, intent = load_frozen(run.config), now.record.life.intent
            job_id = submit_run(run, cfg, how="resume", orphan=intent, token=token)
            if intent is not None and _found_ended(run, intent):
                job_id = submit_run(run, cfg, how="resume")
            return job_id


def _found_ended(run: RunDir, intent: Event) -> bool:
    """Whether the job of this submission, whose outcome nobody had written, was found, and is over: cancelled, say."""
    now = see(run)
    begun = [event for event in now.record.events if event["event"] == "submitting"]
    return begun[-1]["writer"] == intent["writer"] and now.resumable and now.state != "UNKNOWN"


def _attempts_elsewhere(run: RunDir, now: RunView) -> list[str]:
    """Those that are open, and the one that holds the claim: its host may have died before it was journalled."""
    claim = holder(run) or {}
    claimed = {str(claim["attempt"])} if claim.get("attempt") and claim.get("job_id") == now.record.job_id else set()
    return sorted(now.record.life.open | claimed)


def _where(now: RunView) -> str:
    return now.job.problem or f"its processes are {now.job.reason}"


def promote(run: RunDir, rung: int) -> bool:
    """Make a run that has paused at this rung ready for its sweep to submit it again. False: it is no longer there.

    It will continue at the step where it paused. What it has used up of its budgets stays used up.
    """
    with submission_lock(run, LOCK_WAIT_S) as mine:
        life = read_record(run).life
        if not mine or life.paused_at != rung or life.cancel_requested or being_submitted(life, JobView(), time.time()):
            return False
        close_silent_attempts(run, None)
        reopen(run)
        Journal(run.journal).append("reopened", rung=rung)
        return True


def make_ready(run: RunDir) -> None:
    """Make a run that is over, stopped or lost ready for its sweep to submit it again. Raises UserError as ``resume`` does."""
    from hpcmoe.runs.create import being_submitted_text

    with submission_lock(run, LOCK_WAIT_S) as mine:
        now = see(run)
        if not now.resumable or now.state == "COMPLETED":
            raise UserError(f"run {run.run_id} is {now.state} (job {now.record.job_id}); there is nothing to resume")
        if not mine or being_submitted(now.record.life, now.job, time.time()):
            raise UserError(being_submitted_text(run))
        close_silent_attempts(run, None)
        reopen(run)
        Journal(run.journal).append("reopened")


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


class LogTail:
    """Follows one rank's log through all attempts. ``emit`` gets text; each attempt is announced by a line of its own."""

    def __init__(self, run: RunDir, rank: int, emit: Callable[[str], None], last_bytes: int | None = None) -> None:
        """``last_bytes``: of what is there already only so much of the newest attempt; None: all."""
        self.run, self.rank, self.emit = run, rank, emit
        self._last_bytes = last_bytes
        self._offsets: dict[str, int] = {}

    def pump(self) -> bool:
        """Emit what is new. True when there was something."""
        any_new = False
        started = [event for event in read_journal(self.run.journal) if event["event"] == "attempt_started"]
        if self._last_bytes is not None:
            self._skip(started, self._last_bytes)
        for event in started:
            attempt = str(event["attempt"])
            path = self.run.rank_log(attempt, self.rank)
            if not path.exists():
                continue
            if attempt not in self._offsets:
                self.emit(f"--- attempt {attempt} on {compress_hostlist(event.get('hosts') or ())} (rank {self.rank}) ---\n")
            any_new |= self._read(attempt, path)
        return any_new

    def _skip(self, started: Sequence[Event], last_bytes: int) -> None:
        """Pass over what was there before, once."""
        self._last_bytes = None
        paths = {str(event["attempt"]): self.run.rank_log(str(event["attempt"]), self.rank) for event in started}
        sizes = {attempt: path.stat().st_size for attempt, path in paths.items() if path.exists()}
        self._offsets = dict(sizes)
        newest = next(reversed(sizes), None)
        if newest is None:
            return
        del self._offsets[newest]
        if sizes[newest] > last_bytes:
            with paths[newest].open("rb") as file:
                file.seek(sizes[newest] - last_bytes)
                file.readline()
                self._offsets[newest] = file.tell()
            self.emit(f"--- the end of attempt {newest}'s log ---\n")

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
