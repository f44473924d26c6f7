"""Following runs to their ends, with a Slurm that says what the test says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.cli.main import main
from hpcmoe.config.compose import load
from hpcmoe.config.freeze import freeze
from hpcmoe.config.validate import validate
from hpcmoe.locks import file_lock
from hpcmoe.runs import supervise
from hpcmoe.runs.glance import Glancer
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import finish
from hpcmoe.slurm import client
from hpcmoe.slurm.client import QueueRow
from hpcmoe.slurm.command import SlurmUnreachable
from hpcmoe.slurm.facts import SEPARATOR
from tests.hpcmoe_slurm.fakes import FakeSlurm

Queue = dict[str, str]  # job id -> state


def submitted(folder: Path, run_id: str, job_id: str) -> RunDir:
    run = RunDir(folder / run_id)
    run.path.mkdir()
    Journal(run.journal).append("planned", run_id=run_id, scheduler="slurm", steps=60)
    Journal(run.journal).append("submitted", job_id=job_id, how="sweep")
    return run


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    jobs: Queue = {}

    def squeue(ids: list[str]) -> dict[str, QueueRow]:
        return {i: QueueRow(i, jobs[i], "None", time.time(), None, None, 1, "n1", "me", "x", "") for i in ids if i in jobs}

    monkeypatch.setattr(client, "squeue", squeue)
    monkeypatch.setattr(client, "sacct", lambda ids, since: [])
    monkeypatch.setattr(supervise, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(supervise, "ASK_FIRST_S", 0.01)
    monkeypatch.setattr(supervise, "ASK_MOST_S", 0.02)
    return jobs


def test_a_run_of_a_sweep_is_helped_while_an_earlier_one_still_runs(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, stranded = submitted(tmp_path, "long", "7_0"), submitted(tmp_path, "stranded", "7_1")
    queue |= {"7_0": "RUNNING", "7_1": "FAILED"}

    def submit_run(run: RunDir, config: Any, how: str, until: float | None, orphan: Any, token: str | None) -> str:
        assert (run.run_id, how, until, orphan) == ("stranded", "supervisor", None, None)
        finish(stranded, "COMPLETED", None)
        finish(long, "COMPLETED", None)
        return "8"

    freeze(validate(load(["cluster=testbed"])), stranded.config)
    monkeypatch.setattr("hpcmoe.runs.create.submit_run", submit_run)
    said: list[str] = []
    views = supervise.supervise_all([long, stranded], said.append)
    assert [(view.record.run.run_id, view.state) for view in views] == [("long", "COMPLETED"), ("stranded", "COMPLETED")]
    assert said[0] == "run long is RUNNING (job 7_0)"
    assert "submitted again as job 8" in said[2]
    assert len(said) == len(set(said)), "each thing is said once"


def test_runs_that_end_in_any_order_are_reported_in_the_sweeps_order(queue: Queue, tmp_path: Path) -> None:
    runs = [submitted(tmp_path, name, f"7_{task}") for task, name in enumerate("abc")]
    queue |= {"7_0": "RUNNING", "7_1": "RUNNING", "7_2": "RUNNING"}
    left = iter([("c", "FAILED"), ("a", "COMPLETED"), ("b", "CANCELLED")])

    def say(line: str) -> None:  # at each news the next run ends
        ending = next(left, None)
        if ending is not None:
            finish(RunDir(tmp_path / ending[0]), ending[1], None)

    views = supervise.supervise_all(runs, say)
    assert [view.state for view in views] == ["COMPLETED", "CANCELLED", "FAILED"]


def test_one_round_over_a_thousand_runs_asks_slurm_twice_and_helps_the_two_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(tmp_path / "bin", monkeypatch)
    runs = tmp_path / "runs"
    runs.mkdir()
    states = {0: "FAILED", 1: "NODE_FAIL", 2: "CANCELLED"}
    rows = []
    for number in range(1000):
        run = RunDir(runs / f"r{number}")
        run.path.mkdir()
        planned = {"t": time.time(), "event": "planned", "attempt": None, "run_id": run.run_id, "scheduler": "slurm", "steps": 60}
        lines = [planned, planned | {"event": "submitted", "job_id": f"50_{number}", "how": "sweep"}]
        run.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = [f"50_{number}", states.get(number, "RUNNING"), "None", str(int(time.time())), "N/A", "N/A", "1", "n1", "me"]
        rows.append(SEPARATOR.join([*words, "job", ""]))
        if number >= 990:
            finish(run, "COMPLETED", None)
    slurm.answers("squeue", "\n".join(rows))
    slurm.answers("sacct")
    asked: list[str] = []
    monkeypatch.setattr(supervise, "help_on", lambda view, tell: asked.append(view.state))
    began = time.process_time()
    done = supervise.one_round(runs, Glancer())
    spent = time.process_time() - began
    assert (done.open_runs, len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (990, 1, 0)
    assert sorted(asked) == ["CANCELLED"] + ["RUNNING"] * 987 + ["STOPPED"] * 2
    assert spent < 5.0, "a second on a machine of its own"


def test_one_run_in_trouble_does_not_keep_the_others_from_help(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate("abc"):
        submitted(tmp_path, name, f"7_{number}")
        queue[f"7_{number}"] = "CANCELLED"
    (tmp_path / "a" / "events.jsonl").write_bytes(b"no journal at all\n")
    (tmp_path / "b" / ".submission.lock").mkdir()  # cannot be locked
    done = supervise.one_round(tmp_path, Glancer())
    assert [(deed["run_id"], deed["did"]) for deed in sorted(done.deeds, key=lambda deed: deed["run_id"])] == [
        ("b", "not_helped"),
        ("c", "finished"),
    ]


def test_a_second_supervisor_leaves_at_once_and_a_blind_one_says_so(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path))
    submitted(tmp_path, "a", "7")
    with file_lock(tmp_path / ".supervise.lock"):
        assert main(["supervise", "--once"]) == 0
    assert "another supervisor" in capsys.readouterr().err

    def silent(ids: list[str]) -> dict[str, QueueRow]:
        raise SlurmUnreachable("no answer")

    monkeypatch.setattr(client, "squeue", silent)
    assert main(["supervise", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"open_runs": 1, "deeds": [], "problem": "no answer"}


def test_supervise_says_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path / "none"))
    assert main(["supervise", "--once"]) == 2
    assert main(["supervise", "--interval", "1"]) == 2
    assert main(["supervise", "--interval", "soon"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [len(line) > 20 for line in said] == [True] * 3
    assert "at least 5 s" in said[1]


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["COMPLETED", "COMPLETED"], 0),
        (["COMPLETED", "CANCELLED"], 3),
        (["CANCELLED", "STOPPED", "COMPLETED"], 4),
        (["STOPPED", "UNKNOWN"], 5),
        (["FAILED", "UNKNOWN", "STOPPED"], 1),
        ([], 0),
    ],
)
def test_a_sweep_exits_with_the_result_that_needs_a_person_most(states: list[str], code: int) -> None:
    views: list[Any] = [type("View", (), {"state": state}) for state in states]
    assert supervise.worst_exit_code(views) == code


def test_every_end_of_a_run_has_its_place_among_the_exit_codes() -> None:
    assert set(supervise.BY_URGENCY) == set(supervise.EXIT_CODES)
