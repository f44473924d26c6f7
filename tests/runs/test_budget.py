"""What a run may still use up, counted by the causes of its attempts' ends."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.runs.budget import attempts_without_progress, give_up_reason
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


def test_a_new_checkpoint_gives_a_new_budget() -> None:
    attempts = [attempt(0, "crashed", 10), attempt(1, "crashed", 20), attempt(2, "crashed", 30)]
    assert attempts_without_progress(attempts) == 0
    assert give_up_reason(attempts, 1) is None


@given(st.lists(st.sampled_from(["preempted", "requeued", "signalled", "node_failure"]), max_size=30))
def test_being_sent_away_never_uses_up_the_budget(causes: list[str]) -> None:
    assert give_up_reason([attempt(number, cause) for number, cause in enumerate(causes)], 1) is None
