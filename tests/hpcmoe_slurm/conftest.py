"""What the tests of this room share."""

from pathlib import Path

import pytest

from tests.hpcmoe_slurm.fakes import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)
