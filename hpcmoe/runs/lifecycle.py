"""The life of a run as a pure reducer: state x happening -> (state, decisions). Asks nobody, does nothing.

The state (hpcmoe.runs.life) is folded from the journal. What happens: a line of the journal, a look at the job from a login node,
the arrival of a job, the end of its ranks. hpcmoe.runs.arrive, depart, control and supervise bring the facts and act.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from hpcmoe.runs.ending import Cause, Ending
from hpcmoe.runs.journal import Event
from hpcmoe.runs.life import JobView, Life, by_user, standing, step

MOST_TRIES = 3  # submissions by a supervisor in a row that lead to no step
SOON_S = 15.0
# Lifting a hold puts the start some seconds ahead; a job that then waits for its turn must not be put off by it again and again.
LIFT_AGAIN_S = 60.0
# Longer than any submission lasts that is still alive: sbatch's tries, and the looks for a lost answer (hpcmoe.slurm.submit).
SUBMISSION_S = 1800.0
# Longer than one request to sbatch and the looks for its lost answer. Nobody can say if a writer on another host is alive, but
# where Slurm answers here it has answered there: one that has written nothing since is gone.
ORPHAN_S = 300.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0  # after Slurm refused a submission


class Step(StrEnum):
    """What happens next."""

    START = "start"  # let the ranks begin
    LEAVE = "leave"  # this job has nothing to do
    FINISH = "finish"  # for good, with a state
    COME_BACK = "come_back"  # requeue; where refused, submit a successor
    SLURM_BRINGS_BACK = "slurm_brings_back"  # nothing to do: Slurm has requeued the job already
    REST = "rest"  # stays as it is until `hpcmoe resume`
    SUBMIT = "submit"  # from a login node
    LOOK_FOR = "look_for"  # the job of a submission that another host began, in the queue and in accounting
    LIFT_HOLD = "lift_hold"


@dataclass(frozen=True)
class Decision:
    step: Step
    state: str | None = None  # FINISH: COMPLETED | FAILED | CANCELLED; REST: STOPPED
    reason: str | None = None
    token: str | None = None  # SUBMIT, LOOK_FOR: names the submission
    look_first: bool = False  # SUBMIT: the job may exist already
    rung: int | None = None  # REST: of its sweep, at which the run has paused and may be promoted


@dataclass(frozen=True)
class Look:
    """A look at the run's job from a login node."""

    job: JobView
    now: float
    writer_gone: bool = False  # whoever began the last submission is known to be gone
    elsewhere: bool = False  # it was another host
    looked_for: bool = False  # queue and accounting have both told twice, MessageTimeout apart, what they know of its job


@dataclass(frozen=True)
class Arrival:
    """A job script has the run's claim and wants to start an attempt. The reasons: see hpcmoe.runs.budget."""

    job_id: str
    give_up: str | None = None
    spent: str | None = None


@dataclass(frozen=True)
class Departure:
    """The ranks of an attempt have gone."""

    job_id: str
    cause: Cause
    ending: Ending
    scheduler: str  # slurm | local
    detail: str | None = None
    give_up: str | None = None
    spent: str | None = None
    rung: int | None = None  # PAUSED: of its sweep


Happening = Event | Look | Arrival | Departure


def react(life: Life, happening: Happening, run_id: str = "run") -> tuple[Life, tuple[Decision, ...]]:
    """The reducer. A decision to submit is remembered until the journal tells what became of it, so that it comes once."""
    match happening:
        case Look():
            decisions = _on_look(life, happening, run_id)
            asked = next((decision.token for decision in decisions if decision.step is Step.SUBMIT), life.asked)
            return replace(life, asked=asked), decisions
        case Arrival():
            return life, (_on_arrival(life, happening),)
        case Departure():
            return life, _on_departure(life, happening)
    return step(life, happening), ()


def _on_look(life: Life, look: Look, run_id: str) -> tuple[Decision, ...]:
    now, job = standing(life, look.job, look.now), look.job
    if life.ended is not None or life.job_id is None or life.asked is not None:
        return ()
    if now.state == "CANCELLED":
        return (Decision(Step.FINISH, "CANCELLED", now.reason),)
    if now.involuntary:
        if life.supervisor_tries >= MOST_TRIES:
            why = f"{now.reason}; {life.supervisor_tries} submissions led to no step"
            return (Decision(Step.REST, "STOPPED", why),)
        orphan = _orphan(life, look)
        if orphan is False:
            return ()  # somebody is submitting it in this moment
        if life.refusals and look.now < life.refused_at + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (life.refusals - 1)):
            return ()  # a full queue, or a budget that is used up: Slurm is asked again, and ever more seldom
        if orphan is None:
            return (Decision(Step.LOOK_FOR, token=life.token(run_id)),)
        return (Decision(Step.SUBMIT, reason=now.reason, token=life.token(run_id), look_first=life.intent is not None),)
    # Only what Slurm delays after a requeue: a job that never ran has its user's own --begin.
    came_back = life.requeued or any(attempt.rpartition(".")[0] == life.job_id for attempt in life.attempts)
    if now.state == "QUEUED" and job.state in ("PENDING", "REQUEUED") and job.reason == "BeginTime" and came_back:
        put_off = life.not_before is not None and life.not_before > look.now
        soon = job.start is not None and job.start - look.now < SOON_S  # to ask again would put the start off again
        lifted = look.now - life.lifted_at < LIFT_AGAIN_S
        return () if put_off or soon or lifted else (Decision(Step.LIFT_HOLD),)
    return ()


def _orphan(life: Life, look: Look) -> bool | None:
    """Whether nobody is at the submission that was begun last. None: that is to be told from what Slurm knows of its job."""
    if life.intent is None or look.writer_gone or look.now - life.intent["t"] >= SUBMISSION_S:
        return True
    if not look.elsewhere or look.now - life.intent["t"] < ORPHAN_S:
        return False
    return look.looked_for or None


def _on_arrival(life: Life, arrival: Arrival) -> Decision:
    lost = arrival.job_id not in life.jobs and by_user(life.intent)  # a resume whose outcome nobody wrote
    if life.ended is not None and not lost:
        return Decision(Step.LEAVE, str(life.ended["state"]), f"the run is {life.ended['state']} already")
    if life.cancel_requested and not lost:
        return Decision(Step.FINISH, "CANCELLED", "cancelled by its user")
    if arrival.give_up is not None:
        return Decision(Step.FINISH, "FAILED", arrival.give_up)
    if arrival.spent is not None:
        return Decision(Step.REST, "STOPPED", arrival.spent)
    return Decision(Step.START)


def _on_departure(life: Life, end: Departure) -> tuple[Decision, ...]:
    decision = replace(decide(end.cause, end.ending, end.give_up, end.detail, end.scheduler), rung=end.rung)
    if end.spent is not None and decision.step in (Step.COME_BACK, Step.SLURM_BRINGS_BACK):
        decision = Decision(Step.REST, "STOPPED", end.spent)
    over = life.ended is not None or life.job_id not in (None, end.job_id)  # or another job carries the run
    return () if over and decision.state != "COMPLETED" else (decision,)


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
        case Cause.PAUSED:
            return Decision(Step.REST, "STOPPED", reason or "paused at a rung of its sweep")
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
