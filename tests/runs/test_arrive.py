"""One writer: of several jobs that start for one run, one trains, and the others leave at once and say why."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.freeze import freeze
from hpcmoe.config.validate import validate
from hpcmoe.files import write_json
from hpcmoe.runs.arrive import GO_ON, NOTHING_TO_DO, arrive, end_of_job
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.place import Place
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import read_record, result_state
from hpcmoe.slurm import client
from hpcmoe.slurm.client import QueueRow
from hpcmoe.slurm.command import SlurmMissing

States = dict[str, str]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> States:
    states: States = {}

    def squeue(ids: list[str]) -> dict[str, QueueRow]:
        return {i: QueueRow(i, states[i], "None", time.time(), None, None, 1, "n1", "me", "x", "") for i in ids if i in states}

    monkeypatch.setattr(client, "squeue", squeue)
    monkeypatch.setattr(client, "sacct", lambda ids, since: [])
    monkeypatch.setattr(client, "show_job", lambda job_id: None)
    return states


def run_of(folder: Path, *overrides: str) -> RunDir:
    run = RunDir(folder / "abc123")
    run.path.mkdir()
    freeze(validate(load(["cluster=testbed", *overrides])), run.config)
    Journal(run.journal).append("planned", run_id="abc123", scheduler="slurm", steps=60)
    Journal(run.journal).append("submitted", job_id="7", how="submit")
    return run


def place(job: str, restart: int = 0) -> Place:
    return Place(f"{job}.{restart}", job, restart, nodes=1, nodelist="n1", scheduler="slurm")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def names(run: RunDir) -> list[str]:
    return [event["event"] for event in read_journal(run.journal)]


def test_a_ghost_leaves_at_once_and_the_run_stays_the_first_jobs(
    slurm: States, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    assert arrive(run, place("7")) == GO_ON
    slurm["7"] = "RUNNING"
    Journal(run.journal).append("submitted", job_id="8", how="supervisor")
    began = time.monotonic()
    assert arrive(run, place("8")) == NOTHING_TO_DO
    assert time.monotonic() - began < 5.0
    assert "is being trained by job 7; job 8 leaves" in capsys.readouterr().out
    assert read_record(run).job_id == "7"
    assert names(run).count("attempt_started") == 1


def test_a_job_whose_predecessor_is_still_leaving_waits_for_it(
    slurm: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    assert arrive(run, place("7")) == GO_ON
    slurm["7"] = "COMPLETING"
    monkeypatch.setattr("time.sleep", lambda seconds: slurm.update({"7": "FAILED"}))
    assert arrive(run, place("8")) == GO_ON
    assert [attempt.cause for attempt in read_record(run).attempts] == ["unknown", None]


@pytest.mark.parametrize("held", [None, {"job_id": "6", "attempt": "6.0"}])
def test_of_many_jobs_that_start_in_one_moment_one_goes_on(slurm: States, tmp_path: Path, held: dict[str, Any] | None) -> None:
    run = run_of(tmp_path)
    if held is not None:
        write_json(run.claim, held)  # of a job that is no more
    slurm |= {str(job): "RUNNING" for job in range(10, 18)}
    outcomes: dict[str, int] = {}
    crowd = [
        threading.Thread(target=lambda job=str(job): outcomes.update({job: arrive(run, place(job))})) for job in range(10, 18)
    ]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    winners = [job for job, outcome in outcomes.items() if outcome == GO_ON]
    assert len(outcomes) == 8
    assert len(winners) == 1
    assert read(run.claim)["job_id"] == winners[0]
    assert {event["holder"] for event in read_journal(run.journal) if event["event"] == "ghost"} == {winners[0]}


def test_a_job_that_died_while_it_took_a_dead_jobs_claim_does_not_keep_the_run(slurm: States, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    write_json(run.claim, {"job_id": "6", "attempt": "6.0", "ticks": 1})
    dead = {"job_id": "8", "attempt": "8.0", "ticks": 2}
    Journal(run.journal).append("claim_taken", claim=dead, after="6.0@1")
    slurm["8"] = "RUNNING"
    assert arrive(run, place("9")) == NOTHING_TO_DO
    slurm["8"] = "NODE_FAIL"
    assert arrive(run, place("9")) == GO_ON


def test_a_run_that_rests_is_not_started_by_a_requeue_of_its_job(slurm: States, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    Journal(run.journal).append("rested", state="STOPPED", reason="asked")
    assert arrive(run, place("7", 1)) == NOTHING_TO_DO
    assert read_record(run).attempts == []
    assert not run.claim.exists()


def test_a_cancel_that_met_a_requeue_is_kept(slurm: States, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    Journal(run.journal).append("cancel_requested")
    assert arrive(run, place("7", 1)) == NOTHING_TO_DO
    assert result_state(run) == "CANCELLED"


def test_an_attempt_that_would_pass_the_ceiling_gets_a_shorter_time_limit_or_does_not_start(
    slurm: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, "resilience.max_gpu_hours=2")  # four GPUs: half an hour
    asked: list[float] = []

    def end_within(job_id: str, seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) > 1

    monkeypatch.setattr(client, "end_within", end_within)
    assert arrive(run, place("7")) == NOTHING_TO_DO
    assert "Slurm did not take the time limit" in str(read_record(run).finished)
    Journal(run.journal).append("submitted", job_id="8", how="resume")
    assert arrive(run, place("8")) == GO_ON
    assert asked == pytest.approx([1800.0, 1800.0], abs=10.0)


def test_where_slurm_s_commands_are_missing_on_the_node_the_run_starts_all_the_same(
    slurm: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*words: Any) -> Any:
        raise SlurmMissing("no 'scontrol' on this machine")

    monkeypatch.setattr(client, "end_within", missing)
    assert arrive(run_of(tmp_path, "resilience.max_gpu_hours=2"), place("7")) == GO_ON


def test_the_jobs_end_is_asked_of_slurm_and_taken_from_the_environment_where_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setattr(client, "show_job", lambda job_id: SimpleNamespace(end_time=1234.0))
    assert end_of_job(place("7")) == 1234.0
    monkeypatch.setattr(client, "show_job", lambda job_id: None)
    assert end_of_job(place("7")) is None

    def silent(job_id: str) -> None:
        raise SlurmMissing("no scontrol")

    monkeypatch.setattr(client, "show_job", silent)
    assert end_of_job(place("7")) is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1788000000")
    assert end_of_job(place("7")) == 1788000000.0
    assert end_of_job(Place("local-5.0", "local-5", 0, 1, "here", "local")) is None
