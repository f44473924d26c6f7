"""Where a run stands: its state folded from the journal, and that state in a user's words. Pure.

What is to be done about it is decided in hpcmoe.runs.lifecycle.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpcmoe.runs.journal import Event
from hpcmoe.slurm.states import is_alive, is_ended

WAITING_STATES = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "REQUEUE_FED"})
# squeue and sacct lag behind sbatch; a job that is this young and in neither is not gone.
YOUNG_JOB_S = 30.0


@dataclass(frozen=True)
class JobView:
    """What Slurm (or the process table) says of the job that carries a run. None fields: not known."""

    state: str | None = None  # Slurm's base state
    reason: str | None = None
    start: float | None = None  # expected or real, epoch s
    reachable: bool = True  # False: Slurm could not be asked
    problem: str | None = None
    host: str | None = None  # of a local job on another host than this one (hpcmoe.runs.elsewhere)
    gone: bool = False  # of such a job: it has given no sign of life for long


@dataclass(frozen=True)
class Life:
    """Where a run stands, by its journal alone."""

    job_id: str | None = None  # the job that carries the run now, or did last
    jobs: frozenset[str] = frozenset()  # every job that was submitted for it, or has started it
    attempts: tuple[str, ...] = ()  # all that were started, in their order
    open: frozenset[str] = frozenset()  # those whose end nobody has journalled
    news: float = 0.0  # epoch s: submitted, started or requeued last
    ended: Event | None = None  # the event that finished or rested the run; only its user's resume takes it back
    stranded: Event | None = None  # the last attempt wanted to come back, and could not from where it was
    intent: Event | None = None  # a submission that was begun, and nobody has written what became of it
    submissions: int = 0  # begun so far; numbers the tokens
    settled: str | None = None  # token of the submission whose job is known last
    asked: str | None = None  # the token for which a look has already decided to submit
    cancel_requested: bool = False
    refused_at: float = 0.0  # epoch s: Slurm refused a submission last
    refusals: int = 0  # in a row
    supervisor_tries: int = 0  # submissions by a supervisor since the run last made a step
    requeued: bool = False
    not_before: float | None = None  # the next start was put off until then, epoch s
    lifted_at: float = 0.0  # epoch s: the hold after a requeue was lifted last
    max_gpu_hours: float | None = None  # as raised by a resume

    @property
    def finished(self) -> bool:
        return self.ended is not None and self.ended["event"] == "finished"

    @property
    def paused_at(self) -> int | None:
        """The rung of its sweep at which the run rests, and may be promoted; None: it does not."""
        return self.ended.get("rung") if self.ended is not None and not self.finished else None

    def token(self, run_id: str) -> str:
        """Names the submission that comes next; the one that was begun and may have been lost, if there is one."""
        number = max(self.submissions, len(self.jobs))  # journals of old have no intents
        return str(self.intent["token"]) if self.intent is not None else f"{run_id}-{number}"


def _with(life: Life, **changes: Any) -> Life:
    """dataclasses.replace in a tenth of the time: a table of a thousand runs folds fifty thousand events."""
    assert changes.keys() <= Life.__dataclass_fields__.keys(), changes
    new = object.__new__(Life)
    new.__dict__.update(life.__dict__, **changes)
    return new


def fold(events: Iterable[Event]) -> Life:
    """The state after these lines of the journal."""
    life = Life()
    for event in events:
        life = step(life, event)
    return life


def step(life: Life, event: Event) -> Life:
    """The state after one more line of the journal. Unknown events change nothing."""
    match event["event"]:
        case "submitting":
            return _submitting(life, event)
        case "submit_refused":
            return _with(life, intent=None, asked=None, refused_at=event["t"], refusals=life.refusals + 1)
        case "submit_failed":
            # nobody can tell if there is a job: the intent stays, for the next one to look for it
            return _with(life, asked=None, intent=life.intent and {**life.intent, "abandoned": True})
        case "submitted":
            return _submitted(life, event)
        case "attempt_started":
            return _started(life, event)
        case "attempt_ended":
            return _with(life, open=life.open - {event["attempt"]})
        case "ghost":
            return _with(life, job_id=str(event["holder"])) if life.job_id == event["job_id"] else life
        case "first_step" | "progressed":
            return _with(life, supervisor_tries=0)
        case "command_started":  # where nobody sees its steps, to start is all that a submission can be asked for
            return life if event.get("watched") else _with(life, supervisor_tries=0)
        case "requeued":
            return _with(life, requeued=True, news=event["t"], not_before=None)
        case "put_off":
            return _with(life, not_before=float(event["until"]))
        case "hold_lifted":
            return _with(life, lifted_at=event["t"])
        case "stranded":
            return life if life.ended else _with(life, stranded=event)
        case "cancel_requested":
            return _with(life, cancel_requested=True)
        case "finished" | "rested":
            return life if life.finished else _with(life, ended=event, stranded=None)
        case "reopened":  # its sweep submits it again, as soon as there is room
            return _with(life, job_id=None, ended=None, stranded=None, intent=None, cancel_requested=False, requeued=False)
        case "budget_raised":
            return _with(life, max_gpu_hours=float(event["max_gpu_hours"]))
    return life


def by_user(event: Event | None) -> bool:
    """A submission that its user asked for, not a supervisor or a job of its own."""
    return event is not None and event.get("how") in (None, "resume")


def _submitting(life: Life, event: Event) -> Life:
    """Of two that begin at once the first counts; ``instead_of``: the writer of an intent that was found to be an orphan.

    Also where the first is done already: whoever looked before it began has the same token.
    """
    if life.settled is not None and event.get("token") == life.settled:
        return life
    if life.intent is None:
        return _with(life, intent=event, submissions=life.submissions + 1, asked=None)
    inherits = event.get("instead_of") is not None and event["instead_of"] == life.intent.get("writer")
    return _with(life, intent=event, asked=None) if inherits else life


def _submitted(life: Life, event: Event) -> Life:
    job = str(event["job_id"])
    known = _with(life, jobs=life.jobs | {job}, intent=None, settled=_settled(life), asked=None, refusals=0)
    if life.ended and not by_user(event):
        return known  # a supervisor's submission met the run's end: that job will find nothing to do
    return _with(
        known,
        job_id=job,
        news=event["t"],
        ended=None,
        stranded=None,
        requeued=False,
        not_before=event.get("not_before"),
        cancel_requested=life.cancel_requested and not by_user(event),
        supervisor_tries=life.supervisor_tries + 1 if event.get("how") == "supervisor" else 0,
    )


def _settled(life: Life) -> str | None:
    return life.settled if life.intent is None else str(life.intent["token"])


def _started(life: Life, event: Event) -> Life:
    job, attempt = str(event["job_id"]), event["attempt"]
    lost = job not in life.jobs and life.intent is not None  # the job of a submission whose outcome nobody wrote
    users = lost and by_user(life.intent)
    new = () if attempt in life.attempts else (attempt,)
    life = _with(
        life,
        attempts=life.attempts + new,
        open=life.open | set(new),
        jobs=life.jobs | {job},
        settled=_settled(life) if lost else life.settled,
    )
    if life.ended and not users:
        return life
    return _with(
        life,
        job_id=job,
        news=event["t"],
        ended=None,
        stranded=None,
        asked=None,
        intent=None if lost else life.intent,
        cancel_requested=life.cancel_requested and not users,
        not_before=None,
    )


@dataclass(frozen=True)
class Standing:
    """A run's state, and why."""

    state: str  # PLANNED | QUEUED | RUNNING | STOPPED | COMPLETED | FAILED | CANCELLED | UNKNOWN
    reason: str | None = None
    resumable: bool = False  # `hpcmoe resume`, or a supervisor, can bring it back
    involuntary: bool = False  # it stopped although nobody wanted that: a supervisor should bring it back


def standing(life: Life, job: JobView, now: float) -> Standing:
    """The state from the journal and from what Slurm says of the job. The run's own word beats Slurm's; silence is no news."""
    if life.ended is not None:
        state = str(life.ended["state"])
        return Standing(state, life.ended.get("reason"), resumable=state != "COMPLETED")
    if life.job_id is None:
        return Standing("PLANNED", "never submitted", resumable=True)
    if not job.reachable:
        return Standing("UNKNOWN", job.problem or "Slurm cannot be reached", resumable=True)
    if job.state is not None and is_alive(job.state):
        if job.state in WAITING_STATES:
            return Standing("QUEUED", _waits_for(life, job, now))
        return Standing("RUNNING", job.reason if job.reason not in (None, "None") else None)
    if life.stranded is not None:
        return Standing("STOPPED", str(life.stranded["reason"]), resumable=True, involuntary=not life.cancel_requested)
    return _gone(life, job, now)


def _waits_for(life: Life, job: JobView, now: float) -> str | None:
    if life.not_before is None or life.not_before <= now:
        return job.reason
    until = time.strftime("%H:%M:%S", time.localtime(life.not_before))
    return f"{job.reason}: put off until {until}, as it ended too often"


def _gone(life: Life, job: JobView, now: float) -> Standing:
    """The job is over and the run is not: nobody was left to journal the end."""
    if life.cancel_requested or job.state == "CANCELLED":
        return Standing("CANCELLED", "cancelled by its user", resumable=True)
    if job.state is None or not is_ended(job.state):
        if life.news and now - life.news < YOUNG_JOB_S:
            return Standing("QUEUED", "submitted a moment ago; Slurm does not list it yet")
        return Standing("UNKNOWN", f"Slurm no longer knows job {life.job_id}", resumable=True)
    reason = f"job {life.job_id} ended as {job.state} and nobody was left to bring it back"
    return Standing("STOPPED", reason, resumable=True, involuntary=True)
