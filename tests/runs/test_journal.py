"""The journal survives what happens to files on a shared disk: many writers, killed writers, foreign bytes."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.runs.journal import Journal, PatientJournal, read_journal

WRITER = """
import sys
from pathlib import Path
from hpcmoe.runs.journal import Journal
journal = Journal(Path(sys.argv[1]), attempt=sys.argv[2])
for number in range(200):
    journal.append("tick", number=number, padding="x" * 300)
"""


def test_an_absent_journal_is_an_empty_one(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "events.jsonl") == []


def test_events_come_back_in_order_with_their_attempt(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl", attempt="12.0")
    journal.append("planned", run_id="abc")
    journal.append("left", step=3)
    events = read_journal(journal.path)
    assert [event["event"] for event in events] == ["planned", "left"]
    assert {event["attempt"] for event in events} == {"12.0"}
    assert events[0]["t"] <= events[1]["t"]


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), f"{name}.0"]) for name in "abcd"]
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    events = read_journal(path)
    lines = [line for line in path.read_text().splitlines() if line]  # a blank line is how a writer begins afresh
    assert len(events) == len(lines) == 800
    for name in "abcd":
        assert [event["number"] for event in events if event["attempt"] == f"{name}.0"] == list(range(200))


@given(torn=st.binary(max_size=40), cut=st.integers(min_value=0, max_value=60))
def test_a_torn_line_costs_itself_and_no_other(torn: bytes, cut: int, tmp_path_factory: object) -> None:
    path = Path(tmp_path_factory.mktemp("journal")) / "events.jsonl"  # type: ignore[attr-defined]
    journal = Journal(path)
    journal.append("first")
    whole = json.dumps({"t": 1.0, "event": "killed inside its line"}).encode()
    with path.open("ab") as file:
        file.write(torn.replace(b"\n", b" ") + whole[: min(cut, len(whole) - 1)])
    journal.append("after")
    names = [event["event"] for event in read_journal(path)]
    assert names[0] == "first"
    assert names[-1] == "after"
    assert len(names) == 2


def test_a_patient_journal_keeps_what_a_full_disk_refuses_and_writes_it_in_order_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = PatientJournal(tmp_path / "events.jsonl", "7.0")
    journal.append("first")
    write = os.write

    def refuse(fd: int, data: bytes) -> int:
        write(fd, data[:5])  # a part still fits
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    journal.append("second", step=2)
    journal.append("third")
    monkeypatch.undo()
    assert "2 events wait" in capsys.readouterr().err
    journal.append("fourth")
    assert [event["event"] for event in read_journal(journal.path)] == ["first", "second", "third", "fourth"]


def test_what_waits_is_written_by_a_process_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = PatientJournal(tmp_path / "events.jsonl", "7.0")
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: 0)
        journal.append("save_failed", step=20)
    assert read_journal(journal.path) == []
    journal.flush()
    journal.flush()
    assert [event["step"] for event in read_journal(journal.path)] == [20]


def test_an_event_that_was_written_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(OSError, match="No space left"):
        Journal(tmp_path / "events.jsonl").append("first")
