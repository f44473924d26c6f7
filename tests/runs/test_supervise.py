"""Following runs to their ends, with a Slurm that says what the test says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.freeze import freeze
from hpcmoe.config.validate import validate
from hpcmoe.runs import supervise
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import finish
from hpcmoe.slurm import client
from hpcmoe.slurm.client import QueueRow

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

    def submit_run(run: RunDir, config: Any, how: str, until: float | None) -> str:
        assert (run.run_id, how, until) == ("stranded", "supervisor", None)
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
