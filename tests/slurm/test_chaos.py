"""A short storm (benchmarks/chaos.py has long ones): faults at several runs, and nothing is lost that should not be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import chaos
from tests.slurm.storm import Storm
from tests.slurm.testbed_client import Testbed

FAULTS = ("checkpoint damaged", "slurmctld away", "preemption", "node died")
RUNS, STEPS = 2, 60


@pytest.mark.timeout(1200)
def test_runs_that_are_struck_again_and_again_end_as_if_nobody_had_touched_them(
    testbed: Testbed, ordinary_user: str, tmp_path: Path
) -> None:
    storm = Storm(testbed, testbed.shared_folder("storm"), ordinary_user, random.Random(0), STEPS, print)
    storm.rage(FAULTS, RUNS)
    assert set(storm.faults) == set(FAULTS)
    untouched = chaos.untouched_losses(storm.nights[0], tmp_path / "untouched")
    wrong = {night.run_id: chaos.wrong_with(night, untouched, storm.damaged[night.run_id], storm.full) for night in storm.nights}
    assert wrong == {night.run_id: [] for night in storm.nights}, "\n".join(night.postmortem() for night in storm.nights)
