"""What a run may still use up, counted by the causes of its attempts' ends."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.runs.budget import (
    Budgets,
    attempts_without_progress,
    budgets_of,
    give_up_reason,
    not_before,
    seconds_left,
    spent_reason,
)
from hpcmoe.runs.story import Attempt


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


def test_of_a_command_what_was_seen_counts_and_a_time_limit_says_nothing() -> None:
    crashes = [dataclasses.replace(attempt(number, "crashed"), engine="command") for number in range(3)]
    assert attempts_without_progress(crashes) == 3
    assert attempts_without_progress([crashes[0], dataclasses.replace(crashes[1], progressed=True), crashes[2]]) == 1
    limits = [dataclasses.replace(attempt(number, "time_limit"), engine="command") for number in range(3)]
    assert attempts_without_progress(limits) == 0


def test_a_new_checkpoint_gives_a_new_budget() -> None:
    attempts = [attempt(0, "crashed", 10), attempt(1, "crashed", 20), attempt(2, "crashed", 30)]
    assert attempts_without_progress(attempts) == 0
    assert give_up_reason(attempts, 1) is None


@given(st.lists(st.sampled_from(["preempted", "requeued", "signalled", "node_failure"]), max_size=30))
def test_being_sent_away_never_uses_up_the_budget(causes: list[str]) -> None:
    assert give_up_reason([attempt(number, cause) for number, cause in enumerate(causes)], 1) is None


def ended(cause: str, at: float, saved: int | None = None) -> Attempt:
    return Attempt(f"7.{at}", "7", 0, at - 10, ended=at, cause=cause, saved_step=saved, gpus=8)


@pytest.mark.parametrize(
    ("causes", "budgets", "key"),
    [
        (["crashed", "hang", "out_of_memory"], Budgets(99, max_failures=2), "max_failures"),
        (["node_failure"] * 3, Budgets(99, max_node_failures=2), "max_node_failures"),
        (["time_limit"] * 3, Budgets(99, max_time_limits=2), "max_time_limits"),
    ],
)
def test_each_kind_of_end_has_a_budget_of_its_own(causes: list[str], budgets: Budgets, key: str) -> None:
    attempts = [dataclasses.replace(ended(cause, 100.0 * n), first_step=1) for n, cause in enumerate(causes)]
    assert give_up_reason(attempts[:-1], budgets) is None
    assert f"3 {'failures of its own' if key == 'max_failures' else key[4:].replace('_', ' ')}" in str(
        give_up_reason(attempts, budgets)
    )
    assert f"resilience.{key}=2, the last one {causes[-1]}" in str(give_up_reason(attempts, budgets))
    assert give_up_reason(attempts, Budgets(99)) is None


def test_failures_in_a_row_wait_ever_longer_and_the_first_does_not() -> None:
    budgets = Budgets(failure_backoff_s=60.0)
    attempts = [ended("crashed", 1000.0 * n) for n in range(1, 10)]
    waits = [(not_before(attempts[:n], budgets, 0.0) or attempts[n - 1].ended or 0.0) - 1000.0 * n for n in range(1, 10)]
    assert waits == [0, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    saved = [*attempts[:3], ended("crashed", 4000.0, saved=5)]
    assert not_before(saved, budgets, 0.0) is None, "it makes progress"
    assert not_before(attempts, Budgets(), 0.0) is None


def test_preemptions_that_come_thick_put_the_next_start_off_until_the_hour_is_over() -> None:
    budgets = Budgets(max_preemptions_per_hour=2)
    attempts = [ended("preempted", at) for at in (0.0, 1000.0, 2000.0)]
    assert not_before(attempts[:2], budgets, 0.0) is None
    assert not_before(attempts, budgets, 0.0) == 3600.0
    assert not_before([*attempts, ended("preempted", 9000.0)], budgets, 0.0) is None
    assert not_before([*attempts, ended("time_limit", 2500.0)], budgets, 0.0) is None
    assert not_before(attempts, Budgets(), 0.0) is None


@given(st.lists(st.floats(1, 700), min_size=1, max_size=30), st.integers(1, 6))
def test_no_hour_sees_more_preemptions_than_allowed_and_one(held: list[float], most: int) -> None:
    """A queue that takes the nodes away again after ``held`` seconds, and gives them back as soon as it may."""
    budgets, attempts, clock = Budgets(max_preemptions_per_hour=most), list[Attempt](), 0.0
    for seconds in held:
        clock += seconds
        attempts.append(ended("preempted", clock))
        clock = max(clock, not_before(attempts, budgets, 0.0) or 0.0)
    ends = [attempt.ended or 0.0 for attempt in attempts]
    assert all(later - earlier > 3600.0 for earlier, later in zip(ends, ends[most + 1 :], strict=False))


def test_gpu_hours_over_all_attempts_bound_the_next_one() -> None:
    attempts = [Attempt("7.0", "7", 0, 0.0, ended=3600.0, cause="preempted", gpus=8)]
    budgets = Budgets(max_gpu_hours=10.0, stop_lead_s=120.0)
    assert seconds_left(attempts, budgets, 9999.0, gpus=8) == 900.0
    assert seconds_left(attempts, budgets, 9999.0, gpus=16) == 450.0
    assert seconds_left(attempts, budgets, 9999.0, gpus=0) is None
    assert spent_reason(attempts, budgets, 9999.0, gpus=8) is None
    reason = spent_reason(attempts, dataclasses.replace(budgets, max_gpu_hours=8.3), 9999.0, gpus=8)
    assert reason == "8.00 GPU-hours are used, and resilience.max_gpu_hours=8.3 leaves no room for another attempt"


def test_a_config_from_before_a_key_existed_has_no_such_bound_and_a_resume_may_raise_the_ceiling() -> None:
    old = {"resilience": {"max_attempts_without_progress": 5, "stop_lead_s": 60}}
    assert budgets_of(old) == Budgets(5, stop_lead_s=60)
    assert budgets_of({"resilience": {**old["resilience"], "max_gpu_hours": 1.0}}, 7.0).max_gpu_hours == 7.0
