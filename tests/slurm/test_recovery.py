"""Whatever takes the machine away, the run comes back and ends with the losses of a run that nobody touched, bit for bit.

On a real Slurm, two nodes of four ranks. Several things happen to one run in a test, since each return costs a start of eight
processes on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.night import STEPS, Night, begin, hpcmoe

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def untouched(testbed: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run to which nothing happens."""
    night = begin(testbed, tmp_path_factory.mktemp("untouched"), None, "slurm.partition=high")
    night.until_state("COMPLETED", "FAILED", "STOPPED")
    losses = night.losses()
    assert sorted(losses) == list(range(1, STEPS + 1)), night.postmortem()
    return {step: values.pop() for step, values in losses.items()}


@pytest.fixture(params=["root", "ordinary user"])
def user(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "root" else str(request.getfixturevalue("ordinary_user"))


@pytest.fixture
def runs(testbed: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    yield testbed.shared_folder(request.node.name)


def assert_untouched(night: Night, untouched: dict[int, float]) -> None:
    for step, values in night.losses().items():
        assert values == {untouched[step]}, f"step {step}\n{night.postmortem()}"
    assert set(night.losses()) == set(untouched), night.postmortem()
