"""Why an attempt ended, as tables."""

import dataclasses

import pytest

from hpcmoe.runs.ending import Cause, Ending, cause_of, cause_of_record

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
        # a command's rank 0 cannot speak for the others: its word holds where all left with 0
        (ending(verdict="completed", agreed=False), Cause.COMPLETED),
        (ending(verdict="completed", rc=1, agreed=False), Cause.CRASHED),
        (ending(verdict="leave", rc=1, agreed=False), Cause.CRASHED),
        (ending(verdict="leave", rc=137, agreed=False, heard=heard("TERM")), Cause.SIGNALLED),
        (ending(verdict="failed", rc=2, agreed=False), Cause.FAILED),
        # preemption with grace: the job still RUNS, and only PreemptTime tells
        (ending(verdict="leave", job_state="RUNNING", preempt_time=NOW - 2), Cause.PREEMPTED),
        (ending(verdict=None, rc=137, job_state="RUNNING", preempt_time=NOW - 9), Cause.PREEMPTED),
        # preemption without grace
        (ending(verdict="leave", heard=heard("TERM"), job_state="PREEMPTED"), Cause.PREEMPTED),
        # the time limit: USR1 to the batch shell within the lead (and up to 60 s early)
        (ending(verdict="leave", heard=heard("USR1"), job_state="RUNNING", end_time=NOW + 100), Cause.TIME_LIMIT),
        (ending(verdict="leave", heard=heard("USR1"), job_state="RUNNING", end_time=NOW + 3600), Cause.SIGNALLED),
        (ending(verdict=None, rc=143, job_state="TIMEOUT"), Cause.TIME_LIMIT),
        # the ranks saw the end coming themselves; a preemption that came first is one
        (ending(verdict="leave", source="time_limit", job_state="RUNNING", end_time=NOW + 300), Cause.TIME_LIMIT),
        (ending(verdict="leave", source="time_limit", job_state="RUNNING", preempt_time=NOW - 2), Cause.PREEMPTED),
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
