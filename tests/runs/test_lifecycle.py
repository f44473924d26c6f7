"""The life of a run as a reducer: for every order in which things may happen, nothing is lost, left or done twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.runs.ending import Cause, Ending, cause_of
from hpcmoe.runs.journal import Event
from hpcmoe.runs.life import JobView, Life, fold, standing, step
from hpcmoe.runs.lifecycle import (
    MOST_TRIES,
    ORPHAN_S,
    SUBMISSION_S,
    Arrival,
    Decision,
    Departure,
    Happening,
    Look,
    Step,
    decide,
    react,
)
from hpcmoe.slurm.states import ALIVE, ENDED

NOW = 1_000_000.0
JOBS = ["7", "8", "9_3"]


def event(name: str, **fields: Any) -> Event:
    return {"t": NOW, "event": name, "attempt": None, **fields}


def start(job: str, restart: int = 0) -> Event:
    return event("attempt_started", attempt=f"{job}.{restart}", job_id=job, restart=restart)


def end(job: str, restart: int = 0, cause: str = "crashed") -> Event:
    return event("attempt_ended", attempt=f"{job}.{restart}", cause=cause)


def submitted(job: str, how: str = "submit") -> Event:
    return event("submitted", job_id=job, how=how)


QUIET = Ending(now=NOW, verdict=None, rc=0, heard=frozenset(), cancel_requested=False, stop_lead_s=120.0)


def ending(**changes: Any) -> Ending:
    return replace(QUIET, **changes)


jobs, restarts = st.sampled_from(JOBS), st.integers(0, 2)
hows = st.sampled_from(["submit", "sweep", "successor", "supervisor", "resume"])
lines = st.one_of(
    st.builds(start, jobs, restarts),
    st.builds(end, jobs, restarts),
    st.builds(submitted, jobs, hows),
    st.builds(
        lambda how, n, orphan: event("submitting", how=how, token=f"run-{n}", writer=str(n), instead_of=orphan),
        hows,
        restarts,
        st.sampled_from([None, "0", "1"]),
    ),
    st.builds(
        lambda name: event(name, reason="no"), st.sampled_from(["submit_refused", "submit_failed", "stranded", "a new word"])
    ),
    st.builds(lambda state: event("finished", state=state, reason=None), st.sampled_from(["COMPLETED", "FAILED", "CANCELLED"])),
    st.builds(lambda a, b: event("ghost", job_id=a, holder=b), jobs, jobs),
    st.just(event("rested", state="STOPPED", reason="asked")),
    st.just(event("cancel_requested")),
    st.just(event("first_step")),
    st.just(event("requeued", job_id="7", by="slurm")),
    st.just(event("put_off", job_id="7", until=NOW + 9)),
)
views = st.builds(
    JobView,
    state=st.sampled_from([*sorted(ALIVE | ENDED), "UNKNOWN", None]),
    reason=st.sampled_from([None, "BeginTime", "Priority"]),
    start=st.sampled_from([None, NOW, NOW + 90]),
    reachable=st.booleans(),
)
looks = st.builds(Look, views, st.floats(NOW, NOW + 2 * SUBMISSION_S), st.booleans(), st.booleans(), st.booleans())
endings = st.builds(
    Ending,
    now=st.just(NOW),
    verdict=st.just(None),
    rc=st.just(0),
    heard=st.just(frozenset[str]()),
    cancel_requested=st.booleans(),
    stop_lead_s=st.just(1.0),
    job_state=st.sampled_from([None, "COMPLETING", "RUNNING"]),
    requeueing=st.booleans(),
)
reasons = st.sampled_from([None, "enough"])
departures = st.builds(
    Departure, jobs, st.sampled_from(list(Cause)), endings, st.sampled_from(["slurm", "local"]), reasons, reasons, reasons
)
happenings: st.SearchStrategy[list[Any]] = st.lists(
    st.one_of(lines, looks, st.builds(Arrival, jobs, reasons, reasons), departures), max_size=20
)


def live(story: list[Happening]) -> list[tuple[Life, Happening, tuple[Decision, ...], Life]]:
    """Each happening with the life before it, what was decided, and the life after it."""
    lived, life = [], Life()
    for happening in story:
        after, decisions = react(life, happening)
        lived.append((life, happening, decisions, after))
        life = after
    return lived


@given(happenings)
def test_no_attempt_is_lost(story: list[Happening]) -> None:
    started = [
        happening["attempt"] for happening in story if isinstance(happening, dict) and happening["event"] == "attempt_started"
    ]
    lived = live(story)
    life = lived[-1][3] if lived else Life()
    assert life.attempts == tuple(dict.fromkeys(started))
    assert life.open <= set(started)


@given(happenings)
def test_a_terminal_state_is_left_only_by_its_users_resume(story: list[Happening]) -> None:
    for before, happening, _, after in live(story):
        if not before.finished or after.ended == before.ended:
            continue
        assert isinstance(happening, dict)
        resumed = happening if happening["event"] == "submitted" else before.intent
        assert resumed is not None
        assert resumed["how"] == "resume"


@given(happenings)
def test_after_the_end_nothing_is_started_or_brought_back(story: list[Happening]) -> None:
    for before, happening, decisions, _ in live(story):
        if before.ended is None:
            continue
        steps = {decision.step for decision in decisions}
        assert not steps & {Step.SUBMIT, Step.COME_BACK, Step.SLURM_BRINGS_BACK, Step.LIFT_HOLD}
        if Step.START in steps:  # the job of a resume whose outcome was not written yet
            assert isinstance(happening, Arrival)
            assert before.intent is not None
            assert before.intent["how"] == "resume"


@given(happenings)
def test_no_submission_is_decided_twice(story: list[Happening]) -> None:
    """Between two decisions to submit lies a line that tells what became of the first, or the second one looks for its job."""
    told = {"submitted", "submit_refused", "submit_failed", "attempt_started", "submitting"}
    waiting: str | None = None
    for _, happening, decisions, _ in live(story):
        if isinstance(happening, dict) and happening["event"] in told:
            waiting = None
        for decision in decisions:
            if decision.step is Step.SUBMIT:
                assert waiting is None
                waiting = decision.token


STRANDED = [submitted("7", "resume"), start("7"), end("7"), event("stranded", reason="requeue was refused")]


@given(st.lists(lines, max_size=15), st.lists(looks, min_size=1, max_size=5))
def test_however_often_one_ending_is_looked_at_it_is_submitted_once(story: list[Event], others: list[Look]) -> None:
    life = fold([*story, *STRANDED])
    ended = Look(JobView("FAILED"), NOW + 1)
    life, decisions = react(life, ended)
    assert [decision.step for decision in decisions] == [Step.SUBMIT]
    for look in (ended, *others, ended):
        life, decisions = react(life, look)
        assert Step.SUBMIT not in {decision.step for decision in decisions}


@given(st.lists(lines, max_size=15), st.sampled_from(["submit", "sweep", "successor", "supervisor"]), looks)
def test_a_cancel_and_an_end_outlast_what_others_submit(story: list[Event], how: str, look: Look) -> None:
    cancelled = fold([*story, *STRANDED, event("cancel_requested")])
    assert Step.SUBMIT not in {decision.step for decision in react(cancelled, look)[1]}
    assert step(cancelled, submitted("8", how)).cancel_requested
    ended = fold([*story, event("finished", state="FAILED", reason=None)])
    assert step(ended, submitted("8", how)).ended == ended.ended
    assert step(ended, submitted("8", "resume")).ended is None


@given(st.lists(lines, max_size=15), looks)
def test_after_a_supervisor_that_was_killed_while_submitting_the_next_one_looks_for_the_job(
    story: list[Event], look: Look
) -> None:
    life = fold([*story, event("submit_refused"), event("submitting", how="supervisor", token="run-77", writer="dead")])
    life = replace(life, refusals=0)
    for decision in react(life, look)[1]:
        if decision.step is Step.SUBMIT:
            assert (decision.token, decision.look_first) == ("run-77", True)
            old = look.elsewhere and look.looked_for and look.now - NOW >= ORPHAN_S
            assert look.writer_gone or look.now - NOW >= SUBMISSION_S or old


@given(st.lists(lines, max_size=15), looks)
def test_the_submission_of_another_host_is_made_anew_only_when_it_is_old_and_slurm_has_told_of_its_job(
    story: list[Event], look: Look
) -> None:
    orphan = event("submitting", how="supervisor", token="run-77", writer="login9:1:1:a")
    look = replace(look, writer_gone=False, elsewhere=True)
    for decision in react(replace(fold([*story, event("submit_refused"), orphan]), refusals=0), look)[1]:
        if decision.step in (Step.SUBMIT, Step.LOOK_FOR):
            assert decision.token == "run-77"
            assert look.now - NOW >= ORPHAN_S
            assert decision.step is Step.LOOK_FOR or look.looked_for or look.now - NOW >= SUBMISSION_S
            assert decision.step is Step.LOOK_FOR or decision.look_first


@given(st.lists(lines, max_size=15), st.sampled_from(["supervisor", "resume", "successor"]))
def test_who_decided_to_submit_before_another_had_done_so_comes_too_late(story: list[Event], how: str) -> None:
    life = fold([*story, event("submit_refused"), event("submitting", token="run-77", writer="a"), submitted("8", how)])
    late = step(life, event("submitting", token="run-77", how=how, writer="b"))
    assert late == life


@given(st.lists(lines, max_size=15), views)
def test_silence_changes_nothing_and_decides_nothing(story: list[Event], job: JobView) -> None:
    life = fold(story)
    assert react(life, Look(replace(job, reachable=False), NOW + 9999)) == (life, ())


@given(st.lists(lines, max_size=15), st.sampled_from([None, "UNKNOWN"]))
def test_absence_is_no_success_and_no_reason_to_submit(story: list[Event], state: str | None) -> None:
    life = fold(story)
    found = standing(life, JobView(state), NOW + 9999)
    if life.ended is None:
        assert found.state not in ("COMPLETED", "FAILED")
    if life.stranded is None:
        assert Step.SUBMIT not in {decision.step for decision in react(life, Look(JobView(state), NOW + 9999))[1]}


@given(st.lists(lines, max_size=15), views)
def test_the_runs_own_result_beats_the_scheduler(story: list[Event], job: JobView) -> None:
    life = fold(story)
    if life.ended is not None:
        assert standing(life, job, NOW).state == life.ended["state"]
        assert react(life, Look(job, NOW))[1] == ()


@given(happenings)
def test_a_cancelled_run_is_not_brought_back(story: list[Happening]) -> None:
    for before, happening, decisions, _ in live(story):
        if before.cancel_requested and not isinstance(happening, Departure):
            assert not {decision.step for decision in decisions} & {Step.SUBMIT, Step.COME_BACK}


@given(happenings)
def test_only_the_job_that_carries_the_run_brings_it_back(story: list[Happening]) -> None:
    for before, happening, decisions, _ in live(story):
        if isinstance(happening, Departure) and before.job_id not in (None, happening.job_id):
            assert all(decision.state == "COMPLETED" for decision in decisions)


@given(st.lists(lines, max_size=15), looks)
def test_a_supervisor_tires_of_submissions_that_lead_nowhere(story: list[Event], look: Look) -> None:
    life = fold([*story, *(submitted("8", "supervisor") for _ in range(MOST_TRIES))])
    assert Step.SUBMIT not in {decision.step for decision in react(life, look)[1]}


def test_of_a_command_whose_steps_nobody_sees_a_start_is_enough() -> None:
    tried = [submitted("8", "supervisor") for _ in range(MOST_TRIES)]
    assert fold([*tried, event("command_started", watched=True)]).supervisor_tries == MOST_TRIES
    assert fold([*tried, event("command_started", watched=False)]).supervisor_tries == 0
    assert fold([*tried, event("progressed", step=3)]).supervisor_tries == 0


@pytest.mark.parametrize(
    ("story", "job", "decision"),
    [
        ([submitted("7"), start("7")], JobView("FAILED"), Step.SUBMIT),
        ([submitted("7"), start("7"), end("7"), event("stranded", reason="no")], JobView("FAILED"), Step.SUBMIT),
        ([submitted("7"), start("7"), end("7"), event("stranded", reason="no")], JobView("COMPLETING"), None),
        ([submitted("7"), start("7")], JobView("CANCELLED"), Step.FINISH),
        ([submitted("7"), start("7"), event("cancel_requested")], JobView("COMPLETED"), Step.FINISH),
        ([submitted("7"), event("requeued")], JobView("PENDING", "BeginTime", NOW + 90), Step.LIFT_HOLD),
        # Slurm requeued it for a node that failed, and nobody was left to journal it
        ([submitted("7"), start("7")], JobView("PENDING", "BeginTime", NOW + 90), Step.LIFT_HOLD),
        ([submitted("7"), event("requeued")], JobView("PENDING", "BeginTime", NOW + 5), None),  # lifted already
        ([submitted("7"), event("requeued"), event("hold_lifted")], JobView("PENDING", "BeginTime"), None),  # waits for its turn
        ([submitted("7"), event("requeued"), event("put_off", until=NOW + 90)], JobView("PENDING", "BeginTime", NOW + 90), None),
        ([submitted("7")], JobView("PENDING", "BeginTime", NOW + 90), None),  # the user's own --begin
        # Slurm said no a moment ago
        ([submitted("7"), event("submitting", token="r-1"), event("submit_refused")], JobView("FAILED"), None),
        ([submitted("7"), event("submitting", token="r-1", writer="x")], JobView("FAILED"), None),  # is being submitted
        # a ghost left: the run is still the first job's
        ([submitted("7"), start("7"), submitted("8"), event("ghost", job_id="8", holder="7")], JobView("RUNNING"), None),
    ],
)
def test_what_a_look_from_a_login_node_calls_for(story: list[Event], job: JobView, decision: Step | None) -> None:
    decisions = react(fold(story), Look(job, NOW + 1))[1]
    assert [found.step for found in decisions] == ([] if decision is None else [decision])


def test_of_two_that_begin_to_submit_at_once_the_first_counts() -> None:
    life = fold([submitted("7"), event("submitting", token="r-1", writer="a"), event("submitting", token="r-1", writer="b")])
    assert life.intent is not None
    assert life.intent["writer"] == "a"


def test_the_job_of_a_lost_answer_tells_of_itself_when_it_starts() -> None:
    life = fold([submitted("7"), start("7"), end("7"), event("submitting", token="r-0", how="supervisor"), start("8")])
    assert (life.intent, life.job_id) == (None, "8")
    assert life.token("r") == "r-2", "two jobs have carried it"


def test_a_rested_run_stays_so_when_an_administrator_requeues_its_job() -> None:
    life = fold([submitted("7"), start("7"), end("7", cause="stopped"), event("rested", state="STOPPED", reason="asked")])
    assert react(life, Arrival("7"))[1][0].step is Step.LEAVE


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
    facts = ending(verdict="leave", heard=frozenset({"TERM"}), job_state="COMPLETING")
    decision = decide(cause_of(facts), facts, None, None, "slurm")
    assert (decision.step, decision.state) == (Step.REST, "STOPPED")


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
