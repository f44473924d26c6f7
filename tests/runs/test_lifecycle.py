"""Why an attempt ended, and what follows: the life cycle as tables."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.runs.lifecycle import (
    Cause,
    Ending,
    Step,
    attempts_without_progress,
    cause_of,
    cause_of_record,
    decide,
    give_up_reason,
)
from hpcmoe.runs.story import Attempt

NOW = 1_000_000.0
QUIET = Ending(now=NOW, verdict=None, rc=0, heard=frozenset(), cancel_requested=False, stop_lead_s=120.0)


def ending(**changes: object) -> Ending:
    return dataclasses.replace(QUIET, **changes)  # type: ignore[arg-type]


def heard(*names: str) -> frozenset[str]:
    return frozenset(names)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        # the ranks' own word comes first, whatever was heard while they finished
        (ending(verdict="completed", heard=heard("TERM"), job_state="RUNNING", preempt_time=NOW - 3), Cause.COMPLETED),
        (ending(verdict="stopped"), Cause.STOPPED),
        (ending(verdict="failed", rc=2), Cause.FAILED),
        # preemption with grace: the job still RUNS, and only PreemptTime tells
        (ending(verdict="leave", job_state="RUNNING", preempt_time=NOW - 2), Cause.PREEMPTED),
        (ending(verdict=None, rc=137, job_state="RUNNING", preempt_time=NOW - 9), Cause.PREEMPTED),
        # preemption without grace
        (ending(verdict="leave", heard=heard("TERM"), job_state="PREEMPTED"), Cause.PREEMPTED),
        # the time limit: USR1 to the batch shell within the lead (and up to 60 s early)
        (ending(verdict="leave", heard=heard("USR1"), job_state="RUNNING", end_time=NOW + 100), Cause.TIME_LIMIT),
        (ending(verdict="leave", heard=heard("USR1"), job_state="RUNNING", end_time=NOW + 3600), Cause.SIGNALLED),
        (ending(verdict=None, rc=143, job_state="TIMEOUT"), Cause.TIME_LIMIT),
        # a user's cancel, with our verb or with plain scancel
        (ending(verdict="leave", heard=heard("TERM"), job_state="CANCELLED"), Cause.CANCELLED),
        (ending(verdict="leave", heard=heard("TERM"), cancel_requested=True), Cause.CANCELLED),
        # an administrator's requeue
        (ending(verdict="leave", heard=heard("TERM"), job_state="PENDING", requeueing=True), Cause.REQUEUED),
        # nothing heard, nobody asked: a crash
        (ending(verdict=None, rc=137, job_state="RUNNING"), Cause.CRASHED),
        (ending(verdict=None, rc=0, job_state="RUNNING"), Cause.CRASHED),
        (ending(verdict=None, rc=1, job_state="OUT_OF_MEMORY"), Cause.OUT_OF_MEMORY),
        (ending(verdict=None, rc=1, job_state="NODE_FAIL"), Cause.NODE_FAILURE),
        # the watchdog's word, unless somebody asked for the end too
        (ending(verdict=None, rc=75, hung=True, job_state="RUNNING"), Cause.HANG),
        (ending(verdict=None, rc=75, hung=True, heard=heard("TERM")), Cause.HANG),
        (ending(verdict=None, rc=75, hung=True, job_state="RUNNING", preempt_time=NOW - 9), Cause.PREEMPTED),
        (ending(verdict="completed", rc=75, hung=True), Cause.COMPLETED),
        # Slurm cannot be asked, yet a signal was heard
        (ending(verdict="leave", heard=heard("TERM")), Cause.SIGNALLED),
    ],
)
def test_the_cause_of_an_ending(facts: Ending, cause: Cause) -> None:
    assert cause_of(facts) is cause


@pytest.mark.parametrize(
    ("state", "cancelled", "cause"),
    [
        ("PREEMPTED", False, Cause.PREEMPTED),
        ("NODE_FAIL", False, Cause.NODE_FAILURE),
        ("TIMEOUT", False, Cause.TIME_LIMIT),
        ("REQUEUED", False, Cause.REQUEUED),
        ("FAILED", False, Cause.CRASHED),
        ("COMPLETED", False, Cause.CRASHED),  # Slurm's COMPLETED is not ours: no verdict was left
        (None, False, Cause.UNKNOWN),
        ("FAILED", True, Cause.CANCELLED),
    ],
)
def test_the_cause_of_an_attempt_that_left_no_word(state: str | None, cancelled: bool, cause: Cause) -> None:
    assert cause_of_record(state, cancelled) is cause


@pytest.mark.parametrize(
    ("cause", "scheduler", "requeueing", "step", "state"),
    [
        (Cause.COMPLETED, "slurm", False, Step.FINISH, "COMPLETED"),
        (Cause.FAILED, "slurm", False, Step.FINISH, "FAILED"),
        (Cause.CANCELLED, "slurm", True, Step.FINISH, "CANCELLED"),
        (Cause.STOPPED, "slurm", False, Step.REST, "STOPPED"),
        (Cause.PREEMPTED, "slurm", False, Step.COME_BACK, None),
        (Cause.PREEMPTED, "slurm", True, Step.SLURM_BRINGS_BACK, None),
        (Cause.TIME_LIMIT, "slurm", False, Step.COME_BACK, None),
        (Cause.REQUEUED, "slurm", True, Step.SLURM_BRINGS_BACK, None),
        (Cause.SIGNALLED, "slurm", False, Step.COME_BACK, None),
        (Cause.CRASHED, "slurm", False, Step.COME_BACK, None),
        (Cause.HANG, "slurm", False, Step.COME_BACK, None),
        (Cause.NODE_FAILURE, "slurm", False, Step.COME_BACK, None),
        (Cause.CRASHED, "local", False, Step.COME_BACK, None),
        # on a laptop nobody preempts: whoever kills the processes wants them gone
        (Cause.SIGNALLED, "local", False, Step.REST, "STOPPED"),
    ],
)
def test_what_follows(cause: Cause, scheduler: str, requeueing: bool, step: Step, state: str | None) -> None:
    decision = decide(cause, ending(requeueing=requeueing), None, None, scheduler)
    assert (decision.step, decision.state) == (step, state)


def test_a_job_that_somebody_ends_is_not_brought_back_when_it_could_be_a_cancel() -> None:
    facts = ending(verdict="leave", heard=heard("TERM"), job_state="COMPLETING")
    decision = decide(cause_of(facts), facts, None, None, "slurm")
    assert (decision.step, decision.state) == (Step.REST, "STOPPED")


def attempt(number: int, cause: str | None, saved: int | None = None) -> Attempt:
    return Attempt(f"7.{number}", "7", number, float(number), ended=number + 0.5, cause=cause, saved_step=saved, detail=None)


def test_three_crashes_without_a_new_checkpoint_are_enough() -> None:
    attempts = [attempt(0, "preempted", 10), attempt(1, "crashed"), attempt(2, "crashed", 10), attempt(3, "crashed")]
    assert attempts_without_progress(attempts) == 3
    reason = give_up_reason(attempts, 3)
    assert reason is not None
    assert "no progress in 3 attempts" in reason


def test_a_time_limit_too_short_to_start_uses_up_the_budget_and_one_that_lets_it_step_does_not() -> None:
    starved = [attempt(number, "time_limit") for number in range(3)]
    assert attempts_without_progress(starved) == 3
    assert attempts_without_progress([dataclasses.replace(one, first_step=1, last_step=4) for one in starved]) == 0


def test_a_new_checkpoint_gives_a_new_budget() -> None:
    attempts = [attempt(0, "crashed", 10), attempt(1, "crashed", 20), attempt(2, "crashed", 30)]
    assert attempts_without_progress(attempts) == 0
    assert give_up_reason(attempts, 1) is None


@given(st.lists(st.sampled_from(["preempted", "requeued", "signalled", "node_failure"]), max_size=30))
def test_being_sent_away_never_uses_up_the_budget(causes: list[str]) -> None:
    assert give_up_reason([attempt(number, cause) for number, cause in enumerate(causes)], 1) is None


@given(
    st.sampled_from(list(Cause)),
    st.sampled_from(["slurm", "local"]),
    st.booleans(),
    st.one_of(st.none(), st.just("no progress in 3 attempts")),
)
def test_a_users_cancel_is_final_and_a_completed_run_never_returns(
    cause: Cause, scheduler: str, requeueing: bool, give_up: str | None
) -> None:
    decision = decide(cause, ending(requeueing=requeueing), give_up, None, scheduler)
    assert (cause is Cause.CANCELLED) == (decision.state == "CANCELLED")
    assert (cause is Cause.COMPLETED) == (decision.state == "COMPLETED")
    if decision.step is Step.FINISH:
        assert decision.state in {"COMPLETED", "FAILED", "CANCELLED"}
