"""What a table of many runs reads, costs, and says: the same as the whole directory would, for a small part of the bytes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.runs.gist import FILE, MOST_STALE, Gist, gist_of, recall, remember
from hpcmoe.runs.glance import Glancer, glance, skim
from hpcmoe.runs.journal import Journal, last_json_line, read_journal
from hpcmoe.runs.life import JobView
from hpcmoe.runs.observe import observe, view
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import Record, read_record
from hpcmoe.slurm import client
from hpcmoe.slurm.facts import SEPARATOR
from tests.hpcmoe_slurm.fakes import FakeSlurm

NOW = 50_000.0


def lines(*events: dict[str, Any]) -> bytes:
    return b"".join(json.dumps({"t": float(number), **event}).encode() + b"\n" for number, event in enumerate(events))


def run_of(root: Path, data: bytes) -> RunDir:
    run = RunDir(root / "abc123")
    run.path.mkdir()
    run.journal.write_bytes(data)
    return run


ATTEMPT = st.sampled_from(["7.0", "7.1", "8.0"])
EVENT = st.one_of(
    st.builds(lambda a, s: {"event": "checkpoint_saved", "attempt": a, "step": s}, ATTEMPT, st.integers(1, 9)),
    st.builds(lambda a: {"event": "checkpoint_saved", "attempt": a, "step": 9}, ATTEMPT),
    st.builds(lambda a: {"event": "step_skipped", "attempt": a, "step": 3, "reason": "not finite"}, ATTEMPT),
    st.builds(lambda a: {"event": "attempt_started", "attempt": a, "job_id": a[0], "restart": 0, "gpus": 4}, ATTEMPT),
    st.builds(lambda a: {"event": "attempt_ended", "attempt": a, "cause": "preempted"}, ATTEMPT),
    st.builds(lambda a: {"event": "first_step", "attempt": a, "step": 1}, ATTEMPT),
    st.builds(lambda j: {"event": "submitted", "attempt": None, "job_id": j}, st.sampled_from(["7", "8"])),
    st.sampled_from(["cancel_requested", "requeued"]).map(lambda name: {"event": name, "attempt": None}),
    st.just({"event": "rested", "attempt": "7.0", "state": "STOPPED", "reason": "asked"}),
    st.just({"event": "stranded", "attempt": "7.0", "reason": "refused"}),
)


@given(st.lists(EVENT, max_size=25), st.sampled_from(["RUNNING", "PENDING", "CANCELLED", "NODE_FAIL", None]))
def test_a_glance_says_what_the_whole_journal_says(events: list[dict[str, Any]], job: str | None) -> None:
    data = lines({"event": "planned", "attempt": None, "steps": 60}, *events)
    whole = [json.loads(line) for line in data.splitlines()]
    run = RunDir(Path("/nowhere"))
    records = [Record(run, None, [], given_gist=as_remembered(gist_of(skim(data)))), Record(run, whole, given_metrics=[])]
    seen = [view(record, JobView(job), NOW) for record in records]
    assert (seen[0].state, seen[0].reason, seen[0].last_known) == (seen[1].state, seen[1].reason, seen[1].last_known)
    brief, story = glance(seen[0], NOW), seen[1].as_json(NOW)
    assert (brief.attempt_count, brief.gpu_hours) == (len(story["attempts"]), pytest.approx(story["gpu_hours"]))
    assert seen[0].record.gist == seen[1].record.gist


def as_remembered(gist: Gist) -> Gist:
    with tempfile.TemporaryDirectory() as folder:
        remember(Path(folder), {"abc123": ((1, 2, 3), gist)})
        return recall(Path(folder))["abc123"][1]


def many(root: Path, count: int = MOST_STALE + 1) -> list[RunDir]:
    runs = [RunDir(root / f"r{number:03d}") for number in range(count)]
    for run in runs:
        run.path.mkdir()
        run.journal.write_bytes(lines({"event": "planned", "attempt": None}, {"event": "submitted", "job_id": "7"}))
    return runs


def test_another_process_reads_no_journal_that_stayed_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = many(tmp_path)
    before = [record.gist for record in Glancer(tmp_path).read_all(runs)]
    Journal(runs[3].journal).append("rested", state="STOPPED", reason="asked")
    read: list[bytes] = []

    def skim_and_tell(data: bytes) -> list[dict[str, Any]]:
        read.append(data)
        return skim(data)

    monkeypatch.setattr("hpcmoe.runs.glance.skim", skim_and_tell)
    again = Glancer(tmp_path).read_all(runs)
    assert len(read) == 1
    assert [record.gist for record in again[:3] + again[4:]] == before[:3] + before[4:]
    assert again[3].life.ended is not None
    assert [event["event"] for event in again[3].events] == ["planned", "submitted", "rested"]


def test_what_is_remembered_of_few_runs_is_not_written_and_of_runs_that_are_gone_not_kept(tmp_path: Path) -> None:
    runs = many(tmp_path)
    Glancer(tmp_path).read_all(runs[1:])
    assert not (tmp_path / FILE).exists()
    Glancer(tmp_path).read_all(runs)
    shutil.rmtree(runs[0].path)
    for run in runs[1:]:
        run.journal.write_bytes(lines({"event": "planned", "attempt": None}))
    (tmp_path / "else").mkdir()
    Glancer(tmp_path).read_all([*runs[2:], *many(tmp_path / "else")])
    assert set(recall(tmp_path)) == {run.run_id for run in runs[1:]}, "those that somebody else looked at, too"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"program": 1, "runs": {}}', '{"runs": 3}'])
def test_a_file_that_is_not_ours_or_damaged_is_passed_over(text: str, tmp_path: Path) -> None:
    runs = many(tmp_path)
    (tmp_path / FILE).write_text(text)
    assert recall(tmp_path) == {}
    assert len(Glancer(tmp_path).read_all(runs)) == len(runs)
    assert len(recall(tmp_path)) == len(runs)


def test_where_nothing_can_be_written_all_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcmoe.runs.gist.write_atomic", full)
    assert [record.job_id for record in Glancer(tmp_path).read_all(many(tmp_path))] == ["7"] * (MOST_STALE + 1)


def test_of_a_row_of_checkpoints_the_newest_whole_one_is_read() -> None:
    saves = [{"event": "checkpoint_saved", "attempt": "7.0", "step": step} for step in range(500)]
    data = lines(*saves)
    assert [event["step"] for event in skim(data)] == [0, 499]  # the first line of a file is nobody's successor
    assert [event["step"] for event in skim(data[:-9])] == [0, 498], "the last one was torn"
    assert [event["step"] for event in skim(data[:-9] + b"\n" + lines(*saves[:2]))] == [0, 498, 1]


def test_a_run_s_long_metrics_are_not_read_for_a_table(tmp_path: Path) -> None:
    run = run_of(tmp_path, lines({"event": "planned", "attempt": None, "steps": 9, "name": "long"}))
    with run.metrics.open("wb") as file:
        os.ftruncate(file.fileno(), 1 << 42)  # four tebibytes, of which the disk holds nothing: to read them would take hours
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 7, "loss": 2.5, "tokens_per_s": 10.0, "seconds": 2.0, "t": 1.0}\n{"step": 8, "lo')
    brief = glance(view(Glancer().read(run), JobView(), NOW), NOW)
    assert (brief.step, brief.steps, brief.loss, brief.name) == (7, 9, 2.5, "long")


@pytest.mark.parametrize("size", [10, 2040, 2048, 2055, 9000])
def test_the_last_whole_line_is_found_wherever_the_reading_begins(size: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for text in ("", "{", '{"x": 1}\n' + "{" + "y" * size, json.dumps({"pad": "z" * size, "x": 1}) + "\n\n"):
        path.write_text(text)
        assert (last_json_line(path) or {}).get("x") == (1 if len(text) > 1 else None)
    path.unlink()
    assert last_json_line(path) is None


def test_a_second_look_sees_what_was_written_since_and_reads_nothing_else(tmp_path: Path) -> None:
    run = run_of(tmp_path, lines({"event": "planned", "attempt": None}))
    glancer = Glancer()
    first = glancer.read(run)
    assert glancer.read(run).gist is first.gist
    Journal(run.journal).append("submitted", job_id="7")
    assert [event["event"] for event in glancer.read(run).events] == ["planned", "submitted"]
    run.journal.unlink()
    assert glancer.read(run).events == []


def test_what_is_given_is_used_and_nothing_is_read(tmp_path: Path) -> None:
    run = run_of(tmp_path, b"")
    run.metrics.write_text('{"step": 3}\n')
    assert read_record(run).last_line == {"step": 3}
    assert Record(run, read_journal(run.journal), given_metrics=[]).last_line is None


def queue_row(job_id: str) -> str:
    return SEPARATOR.join([job_id, "RUNNING", "None", "1", "2", "3", "1", "n1", "me", "name", ""]) + "\n"


@pytest.mark.parametrize(("task", "filtered"), [("", "--user="), ("_", "--jobs=7")])
def test_a_thousand_runs_are_two_commands_of_a_moderate_length(
    task: str, filtered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(tmp_path / "bin", monkeypatch)
    ids = [f"7{task}{number}" for number in range(1000)]
    run = RunDir(tmp_path)
    records = [Record(run, [{"t": 0.0, "event": "submitted", "job_id": job_id, "uid": 4321}], given_metrics=[]) for job_id in ids]
    slurm.answers("squeue", "".join(map(queue_row, ids[:-1])))
    slurm.answers("sacct")
    states = [seen.state for seen in observe(records, NOW)]
    assert states == ["RUNNING"] * 999 + ["UNKNOWN"]
    [asked] = slurm.calls("squeue")
    assert filtered in asked
    assert ("--user=4321" in asked) == (task == "")
    assert len(asked) < 1000
    assert len(slurm.calls("sacct")) == 1


def test_jobs_that_can_be_named_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(tmp_path / "bin", monkeypatch)
    slurm.answers("squeue")
    client.squeue(["7", "8_1", "8_2"], "1000")
    assert slurm.calls("squeue")[0].endswith("--jobs=7,8_1,8_2")
