"""What a user does to a run reaches that run's job and no other."""

import time
from pathlib import Path

import pytest

from hpcmoe.errors import UserError
from hpcmoe.runs.control import cancel
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.slurm import client
from hpcmoe.slurm.client import QueueRow
from hpcmoe.slurm.command import SlurmUnreachable


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "abc123")
    run.path.mkdir()
    journal = Journal(run.journal)
    journal.append("planned", run_id="abc123", scheduler="slurm", steps=60)
    journal.append("submitted", job_id="7", how="submit")
    return run


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids that scancel was given."""
    ids: list[str] = []
    monkeypatch.setattr(client, "cancel", ids.extend)
    monkeypatch.setattr(client, "sacct", lambda ids, since: [])
    return ids


def test_a_job_that_only_has_the_same_id_is_left_alone(
    run: RunDir, cancelled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = QueueRow("7", "RUNNING", "None", time.time() - 9000, None, None, 1, "n1", "me", "other", "")
    monkeypatch.setattr(client, "squeue", lambda ids: {"7": older})
    monkeypatch.setattr("hpcmoe.runs.life.YOUNG_JOB_S", -1.0)
    assert cancel(run).state == "CANCELLED"
    assert cancelled == []


def test_nothing_is_cancelled_or_written_while_slurm_cannot_be_asked(
    run: RunDir, cancelled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(ids: list[str]) -> dict[str, QueueRow]:
        raise SlurmUnreachable("no answer")

    monkeypatch.setattr(client, "squeue", silent)
    with pytest.raises(UserError, match="not cancelled: no answer"):
        cancel(run)
    assert cancelled == []
    assert "cancel_requested" not in [event["event"] for event in read_journal(run.journal)]
