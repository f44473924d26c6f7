"""A sweep whose nodes are taken away ends as one that nobody touched (benchmarks/sweep_night.py has a long night)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.slurm.sweep_night import Judgement, SweepNight, rage, small_arrays
from tests.slurm.testbed_client import Testbed

MOST, SCRIPTS = 5, 10  # elements of an array; and two points that train


@pytest.mark.timeout(900)
def test_a_sweep_of_several_arrays_ends_once_a_point_though_nodes_are_taken_away_and_two_of_its_points_raise(
    testbed: Testbed, ordinary_user: str, tmp_path: Path
) -> None:
    runs = testbed.shared_folder("sweep")
    night = SweepNight(testbed, runs, ordinary_user, random.Random(0), print, steps=15)
    with small_arrays(testbed, MOST):
        night.submit_scripts(SCRIPTS)
        night.add_trained()
        rage(night, [0.0, 3.0])
        judgement = Judgement(night, tmp_path, MOST)
        assert judgement.wrong() == [], night.postmortem()
    assert judgement.preempted() > 0, night.postmortem()
