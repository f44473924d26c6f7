"""How the storm is judged: what an attempt may lose, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chaos import most_lost
from tests.slurm.storm import INTERVAL

TIMES = [100.0 + 0.1 * step for step in range(300)]  # ten steps a second, from 100 s to 129.9 s


@pytest.mark.parametrize(
    ("cause", "damaged", "full", "most"),
    [
        ("preempted", 0, [], 0),
        ("crashed", 0, [], INTERVAL + 5),  # five steps while the newest save was written
        ("crashed", 1, [], 2 * INTERVAL + 5),
        ("preempted", 1, [], 2 * INTERVAL + 5),
        ("crashed", 0, [(110.0, 120.05)], INTERVAL + 5 + 101),
        ("preempted", 0, [(110.0, 120.05)], 0),  # it was over long before the warning
        ("preempted", 0, [(125.0, 135.0)], INTERVAL + 5 + 50),
    ],
)
def test_an_attempt_may_lose_an_interval_and_what_nobody_could_have_saved(
    cause: str, damaged: int, full: list[tuple[float, float]], most: int
) -> None:
    attempt: dict[str, Any] = {"cause": cause, "ended": 131.0, "steps_unwritten": 0}
    assert most_lost(attempt, TIMES, damaged, 0.55, full) == pytest.approx(most, abs=1)
