"""What a user does to a run reaches that run's job and no other."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcmoe.errors import UserError
from hpcmoe.runs import control
from hpcmoe.runs.control import LogTail, cancel, cancel_all
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.observe import RunView
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import Record
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


def row(job_id: str, state: str) -> QueueRow:
    return QueueRow(job_id, state, "None", time.time(), None, None, 1, "n1", "me", "hpcmoe", "")


def test_many_runs_are_cancelled_with_one_command_and_those_that_are_over_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [RunDir(tmp_path / f"run00{number}") for number in range(4)]
    for number, run in enumerate(runs):
        run.path.mkdir()
        Journal(run.journal).append("planned", run_id=run.run_id, scheduler="slurm", steps=60)
        if number < 3:
            Journal(run.journal).append("submitted", job_id=f"7_{number}", how="sweep")
    Journal(runs[0].journal).append("finished", state="COMPLETED", reason=None)
    queue = {"7_1": row("7_1", "RUNNING"), "7_2": row("7_2", "PENDING")}
    commands: list[list[str]] = []

    def scancel(ids: list[str]) -> None:
        commands.append(ids)
        queue.clear()

    monkeypatch.setattr(client, "cancel", scancel)
    monkeypatch.setattr(client, "squeue", lambda ids: dict(queue))
    monkeypatch.setattr(client, "sacct", lambda ids, since: [])
    assert [view.state for view in cancel_all(runs)] == ["COMPLETED", "CANCELLED", "CANCELLED", "CANCELLED"]
    assert commands == [["7_1", "7_2"]]
    asked = [any(event["event"] == "cancel_requested" for event in read_journal(run.journal)) for run in runs]
    assert asked == [False, True, True, True], "the run that waits for room is cancelled before it has a job"


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_job_that_was_submitted_a_moment_ago_is_cancelled_before_slurm_lists_it(
    run: RunDir, cancelled: list[str], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(client, "squeue", lambda ids: {})
    if moment == "before":  # it grows too old to be a new one while the request is written
        see = control.observe

        def slow(records: list[Record]) -> list[RunView]:
            views = see(records)
            monkeypatch.setattr("hpcmoe.runs.life.YOUNG_JOB_S", -1.0)
            return views

        monkeypatch.setattr(control, "observe", slow)
        views = cancel_all([run])
    else:  # by whoever held the lock
        run.journal.unlink()
        Journal(run.journal).append("planned", run_id="abc123", scheduler="slurm", steps=60)

        @contextlib.contextmanager
        def lock(run: RunDir, wait_s: float) -> Iterator[bool]:
            Journal(run.journal).append("submitted", job_id="7", how="sweep")
            yield True

        monkeypatch.setattr(control, "submission_lock", lock)
        views = cancel_all([run])
    assert [view.state for view in views] == ["CANCELLED"]
    assert cancelled == ["7"]


def test_a_controller_that_falls_silent_after_the_request_leaves_the_runs_open(
    run: RunDir, cancelled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [{"7": row("7", "RUNNING")}, {"7": row("7", "RUNNING")}]  # to `cancel`, and to its look before the request

    def squeue(ids: list[str]) -> dict[str, QueueRow]:
        if not answers:
            raise SlurmUnreachable("no answer")
        return answers.pop()

    monkeypatch.setattr(client, "squeue", squeue)
    with pytest.raises(UserError, match="the cancellation of run abc123 stands, but its job was not ended: no answer"):
        cancel(run)
    events = [event["event"] for event in read_journal(run.journal)]
    assert "cancel_requested" in events
    assert "finished" not in events, "its job may still run"


def test_of_a_long_log_that_is_followed_only_the_end_is_shown_and_what_comes_then(run: RunDir) -> None:
    for attempt, text in (("7.0", "old\n"), ("7.1", "".join(f"line {number}\n" for number in range(1000)))):
        Journal(run.journal, attempt).append("attempt_started", job_id="7", restart=0, hosts=["n1"])
        run.attempt(attempt).mkdir(parents=True)
        run.rank_log(attempt, 0).write_text(text)
    said: list[str] = []
    tail = LogTail(run, 0, said.append, last_bytes=30)
    tail.pump()
    assert "".join(said) == "--- the end of attempt 7.1's log ---\nline 997\nline 998\nline 999\n"
    with run.rank_log("7.1", 0).open("a") as log:
        log.write("line 1000\n")
    tail.pump()
    assert said[-1] == "line 1000\n"
    whole: list[str] = []
    LogTail(run, 0, whole.append, last_bytes=30000).pump()
    assert "".join(whole).startswith("--- attempt 7.1 on n1 (rank 0) ---\nline 0\n")
