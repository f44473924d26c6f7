"""What a sweep costs and how long it takes, or every reason against it, before anything is submitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.runs.sweep_plan import PlannedPoint, forecast, longest_path, plan_text, refusal

HOURS = st.lists(st.floats(0, 100), max_size=12)


def points(*hours: float | None, gpus: int = 8, shape: str = "one") -> list[PlannedPoint]:
    return [
        PlannedPoint(index, (f"train.seed={index}", "model=tiny"), gpus, each, None if each is None else gpus * each, shape)
        for index, each in enumerate(hours)
    ]


@pytest.mark.parametrize(("at_once", "hours"), [(None, 4.0), (9, 4.0), (1, 10.0), (2, 6.0), (3, 5.0)])
def test_the_longest_path_follows_the_throttle(at_once: int | None, hours: float) -> None:
    assert longest_path([1.0, 2.0, 3.0, 4.0], at_once) == hours


@given(HOURS, st.integers(1, 5))
def test_no_throttle_makes_a_sweep_shorter_than_its_work_or_longer_than_one_after_the_other(
    hours: list[float], at_once: int
) -> None:
    path = longest_path(hours, at_once)
    assert max(hours, default=0.0) <= path + 1e-9
    assert sum(hours) / at_once <= path + 1e-6
    assert path <= sum(hours) + 1e-6


def test_arrays_are_counted_by_shape_and_by_the_site_s_limit() -> None:
    many = points(*[1.0] * 12) + points(*[1.0] * 3, shape="other")
    assert forecast(many, None, most_elements=5).arrays == 3 + 1
    assert forecast(many, None, most_elements=None).arrays == 0, "no arrays without Slurm"


def test_the_plan_is_a_table_of_what_differs_and_the_whole_in_two_lines() -> None:
    two = [*points(2.0, 1.0), PlannedPoint(2, ("train.seed=2", "model=tiny"), 8, 1.0, 8.0, "one", same_as="abc123")]
    assert plan_text(two, forecast(two, 1, 1000)).splitlines() == [
        "POINT  train.seed  GPUS  TIME   GPU-HOURS",
        "0      0           8     2h00m  16.0",
        "1      1           8     1h00m  8.0",
        "2      2           8     1h00m  8.0        not run: the same as run abc123",
        "all points: model=tiny",
        "2 runs in 1 array, about 24.0 GPU-hours; 1 more not run, as there are such runs",
        "longest path, 1 at once: about 3h00m; waiting in the queue not counted",
    ]


def test_what_is_not_known_is_said_and_not_counted() -> None:
    some = points(2.0, None)
    assert plan_text(some, forecast(some, None, 1000)).splitlines()[-2:] == [
        "2 runs in 1 array, about 16.0 GPU-hours and those of 1 point, which are not known",
        "longest path, all at once: at least 2h00m, as the time of 1 point is not known; waiting in the queue not counted",
    ]
    none = points(None, gpus=0)
    last = plan_text(none, forecast(none, None, 1000)).splitlines()[-1]
    assert last.endswith("neither a speed is on record nor slurm.time given")
    free = [PlannedPoint(0, (), 0, 1.0, 0.0, "one")]
    assert plan_text(free, forecast(free, 1, None)).splitlines()[1] == "0      -     1h00m  0.0"
    assert "1 run, no GPUs are counted here" in plan_text(free, forecast(free, 1, None)).splitlines()


def test_a_long_table_is_cut_with_a_line_that_says_how_many_more() -> None:
    long = points(*[1.0] * 1000)
    lines = plan_text(long, forecast(long, 4, 1000)).splitlines()
    assert lines[21] == "... and 980 more points; --dry-run --json lists all"
    assert len(lines) == 25


def test_every_bad_point_is_named_at_once_equal_reasons_together() -> None:
    seeds = [
        (index, [f"nodes={nodes}", f"train.seed={index}"], f"{nodes} nodes are bad") for index, nodes in enumerate([3, 3, 5, 3])
    ]
    assert refusal(seeds, 9) == (
        "4 of 9 points cannot be run, and none is submitted: points 0-1, 3 (nodes=3): 3 nodes are bad; "
        "point 2 (nodes=5 train.seed=2): 5 nodes are bad"
    )
    assert refusal(seeds[:2], 2) == "all 2 points (nodes=3): 3 nodes are bad"
    assert refusal(seeds[2:3], 9) == "point 2 (nodes=5 train.seed=2): 5 nodes are bad"


def test_of_very_many_different_reasons_the_points_are_named_all_the_same() -> None:
    line = refusal([(index, [], f"reason {index}") for index in range(100)], 100)
    assert line.endswith("; and, for 80 other reasons, points 20-99")
