"""What a sweep does next, as a pure function: no more at once than the throttle, no more jobs than there is room, none twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcmoe.runs.pace import Facts, Policy, Queued, SetShare, Stop, Submit, decide, spread

ANY = Policy()


@st.composite
def sweeps(draw: st.DrawFn) -> Facts:
    jobs = []
    for number in range(draw(st.integers(0, 4))):
        left = draw(st.integers(0, 12))
        running = draw(st.integers(0, left))
        jobs.append(
            Queued(str(number), left, running, draw(st.none() | st.integers(0, 12)), array=draw(st.booleans()) or left > 1)
        )
    sizes = draw(st.lists(st.integers(1, 30), max_size=3))
    points = iter(range(sum(sizes)))
    return Facts(
        queued=tuple(jobs),
        waiting=tuple(tuple(next(points) for _ in range(size)) for size in sizes),
        throttle=draw(st.none() | st.integers(1, 20)),
        room=draw(st.none() | st.integers(0, 40)),
        room_of=draw(st.none() | st.integers(1, 60)),
        most=draw(st.integers(1, 11)),
        stopped=draw(st.booleans()),
        leaving=draw(st.booleans()),
    )


def after(facts: Facts, share_only: bool = False) -> list[Queued]:
    """The sweep's jobs once what was decided is done."""
    jobs = {job.job_id: job for job in facts.queued}
    for number, action in enumerate(decide(ANY, facts)):
        if isinstance(action, SetShare):
            jobs[action.job_id] = replace(jobs[action.job_id], share=action.share)
        elif isinstance(action, Submit) and not share_only:
            name = f"new{number}"
            jobs[name] = Queued(name, len(action.points), 0, action.share, array=len(action.points) > 1)
    return list(jobs.values())


@settings(max_examples=300)
@given(sweeps())
def test_no_more_run_at_once_than_the_throttle_but_those_that_do_already(facts: Facts) -> None:
    if facts.throttle is None:
        return
    before = sum(job.running for job in facts.queued)
    assert sum(job.most for job in after(facts)) <= max(facts.throttle, before)
    # what does not wait for the end of the element that is leaving counts it
    now = sum(job.most for job in after(facts, share_only=True)) + facts.leaving
    assert now <= max(facts.throttle, before + facts.leaving, sum(job.most for job in facts.queued) + facts.leaving)


@settings(max_examples=300)
@given(sweeps())
def test_what_is_submitted_waited_fits_and_is_submitted_once(facts: Facts) -> None:
    submits = [action for action in decide(ANY, facts) if isinstance(action, Submit)]
    submitted = [point for action in submits for point in action.points]
    assert not (facts.stopped and submits)
    assert len(submitted) == len(set(submitted))
    assert facts.room is None or len(submitted) <= facts.room
    for action in submits:
        assert 1 <= len(action.points) <= facts.most
        assert any(set(action.points) <= set(shape) for shape in facts.waiting)


@settings(max_examples=200)
@given(sweeps())
def test_what_was_decided_is_not_decided_again(facts: Facts) -> None:
    done = replace(facts, queued=tuple(after(facts, share_only=True)), waiting=(), leaving=False)
    raised = [action for action in decide(ANY, done) if isinstance(action, SetShare)]
    assert not raised or facts.leaving or facts.waiting


@settings(max_examples=100)
@given(sweeps())
def test_a_sweep_goes_on_to_its_end_whoever_asks(facts: Facts) -> None:
    """Elements end one by one, each asking as it leaves; nobody else is awake."""
    facts = replace(facts, stopped=False, room=None, room_of=None, queued=())
    jobs: list[Queued] = []
    waiting, submitted = list(facts.waiting), 0
    total = sum(map(len, waiting))
    leaving = False
    for _ in range(3 * total + 3):
        now = replace(facts, queued=tuple(jobs), waiting=tuple(waiting), leaving=leaving)
        new = []
        for action in decide(ANY, now):
            if isinstance(action, SetShare):
                jobs = [replace(job, share=action.share) if job.job_id == action.job_id else job for job in jobs]
            elif isinstance(action, Submit):
                submitted += len(action.points)
                waiting = [tuple(p for p in shape if p not in action.points) for shape in waiting]
                waiting = [shape for shape in waiting if shape]
                new.append(Queued(f"j{submitted}", len(action.points), 0, action.share, len(action.points) > 1))
        jobs = [replace(job, running=min(job.most, job.left)) for job in [*jobs, *new]]
        running = next((job for job in jobs if job.running), None)
        if running is None:
            break
        jobs = [replace(j, left=j.left - 1, running=j.running - 1) if j is running else j for j in jobs]
        jobs = [job for job in jobs if job.left]
        leaving = True
    assert submitted == total
    assert not jobs


def test_an_array_gets_what_another_no_longer_needs() -> None:
    facts = Facts((Queued("1", 3, 3, 5), Queued("2", 10, 5, 5)), throttle=10)
    assert decide(ANY, facts) == (SetShare("2", 7),)


def test_a_lower_throttle_holds_arrays_for_which_nothing_is_left() -> None:
    facts = Facts((Queued("1", 10, 2, 2), Queued("2", 10, 2, 2)), throttle=1)
    assert decide(ANY, facts) == (SetShare("1", 1), SetShare("2", 0))


def test_more_arrays_than_the_throttle_wait() -> None:
    facts = Facts(waiting=((0, 1), (2, 3), (4, 5)), throttle=2)
    assert decide(ANY, facts) == (Submit((0, 1), 1), Submit((2, 3), 1))


def test_the_last_of_an_array_lets_the_next_one_follow_it() -> None:
    facts = Facts((Queued("1", 0, 0, 1),), waiting=((4, 5),), throttle=1, leaving=True)
    assert decide(ANY, facts) == (Submit((4, 5), 1),)


def test_single_places_are_not_filled_one_by_one_while_others_wait_in_the_queue() -> None:
    waiting = (tuple(range(500)),)
    busy = Queued("1", 99, 50)
    assert decide(ANY, Facts((busy,), waiting, room=1, room_of=100)) == ()
    assert decide(ANY, Facts((busy,), waiting, room=10, room_of=100)) == (Submit(tuple(range(10))),)
    assert decide(ANY, Facts((replace(busy, left=50),), waiting, room=1, room_of=100)) == (Submit((0,)),)


def test_failures_stop_a_sweep_only_where_that_was_asked_for() -> None:
    facts = Facts(waiting=((1, 2),), failures=3)
    assert decide(Policy(), facts) == (Submit((1, 2)),)
    assert decide(Policy(max_failures=3), facts) == (Submit((1, 2)),)
    (stop,) = decide(Policy(max_failures=2, on_max_failures="stop"), facts)
    assert isinstance(stop, Stop)
    assert stop.running
    assert "3 failed runs are more than sweep.max_failures=2" in stop.reason
    assert decide(Policy(max_failures=2), replace(facts, stopped=True)) == ()


def test_shares_are_even_and_one_at_least_as_far_as_they_go() -> None:
    assert spread(10, [100, 100, 100]) == [4, 3, 3]
    assert spread(10, [1, 100, 2]) == [1, 7, 2]
    assert spread(2, [5, 5, 5]) == [1, 1, 0]
    assert spread(9, []) == []
