"""What the comparison of ways makes of metrics that are given."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.goodput import Result, result_of, schedule, table


def lines(attempt: str, first: int, last: int, t: float) -> list[dict[str, Any]]:
    return [
        {"attempt": attempt, "step": step, "t": t + step - first, "seconds": 1.0, "loss": 1.0} for step in range(first, last + 1)
    ]


def test_steps_done_again_are_useful_once_and_the_time_between_attempts_counts() -> None:
    found = result_of("script", "with grace", lines("7.0", 1, 70, 1.0) + lines("7.1", 51, 100, 101.0), 100)
    assert (found.finished, found.attempts, found.useful_steps, found.all_steps) == (True, 2, 100, 120)
    assert (found.useful_s, found.wall_s) == (100.0, 150.0)
    assert (found.of_steps, found.of_wall, found.steps_a_minute) == pytest.approx((100 / 120, 2 / 3, 40))


def test_ratios_are_to_hpcmoe_under_the_same_preemptions_and_what_was_not_finished_says_so() -> None:
    own = Result("hpcmoe", "with grace", True, 2, 100, 100, 100.0, 120.0)
    lost = Result("script", "with grace", False, 1, 50, 70, 50.0, 120.0)
    rows = table([own, lost]).splitlines()[1:]
    assert rows[0].endswith("100 of 100  100.0%   2.0         83.3%               50        1.00")
    assert rows[1].endswith("0.50  NOT FINISHED after 1 attempts")


def test_preemptions_are_the_same_for_everybody_and_come_in_the_middle_of_things() -> None:
    strikes = schedule(seed=1, preemptions=50, interval=40)
    assert strikes == schedule(seed=1, preemptions=50, interval=40)
    assert min(strikes) >= 20
    assert max(strikes) < 100
