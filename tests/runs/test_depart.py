"""What a job script does when its ranks have gone, with a Slurm that answers what the test says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.freeze import freeze
from hpcmoe.config.validate import validate
from hpcmoe.files import write_json
from hpcmoe.runs import depart as room
from hpcmoe.runs.depart import FAILED, OK, START_AGAIN, depart
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.place import Place
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import finish, read_record
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmMissing, SlurmRejected, SlurmUnreachable
from hpcmoe.slurm.directives import read_directives

PLACE = Place("7.0", "7", 0, nodes=1, nodelist="n1", scheduler="slurm")
Answer = Callable[..., Any]


def no(error: Exception) -> Answer:
    def refuse(*words: Any, **more: Any) -> Any:
        raise error

    return refuse


class Slurm:
    """What was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._patch = monkeypatch
        monkeypatch.setattr(client, "show_ending", no(SlurmMissing("no 'scontrol' on this machine")))
        self.answers(client, "requeue", lambda job_id: None)
        self.answers(client, "start_soon", lambda job_id, not_before=None: True)
        self.answers(room, "sbatch", lambda script, args, token: "8")

    def answers(self, where: Any, name: str, answer: Answer) -> None:
        def ask(*words: Any, **more: Any) -> Any:
            self.calls.append((name, *words[:2], *more.values()))
            return answer(*words, **more)

        self._patch.setattr(where, name, ask)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(monkeypatch)


def run_of(folder: Path, *overrides: str, attempts: int = 1) -> RunDir:
    """The newest attempt runs; those before it crashed."""
    run = RunDir(folder / "abc123")
    run.path.mkdir()
    freeze(validate(load(["cluster=testbed", *overrides])), run.config)
    Journal(run.journal).append("planned", run_id="abc123", scheduler="slurm", steps=60)
    Journal(run.journal).append("submitted", job_id="7", how="submit")
    for number in reversed(range(attempts)):
        journal = Journal(run.journal, f"7.{number}")
        journal.append("attempt_started", job_id="7", restart=number, nodes=1, gpus=4)
        if number:
            journal.append("attempt_ended", cause="crashed", detail="a rank died")
    run.attempt("7.0").mkdir(parents=True)
    return run


def leaves(run: RunDir, verdict: str | None = "leave", rc: int = 0, heard: str = "TERM") -> int:
    if verdict is not None:
        write_json(run.verdict("7.0"), {"verdict": verdict, "step": 3, "source": "signal", "reason": None})
    return depart(run, PLACE, rc, frozenset(heard.split()))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def told(run: RunDir, *names: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run.journal) if event["event"] in names]


def test_a_run_that_was_told_to_leave_is_requeued_and_its_hold_is_lifted(slurm: Slurm, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert leaves(run) == OK
    assert slurm.calls == [("requeue", "7"), ("start_soon", "7", None)]
    assert [event["event"] for event in told(run, "requeued", "hold_lifted", "put_off")] == ["requeued", "hold_lifted"]


@pytest.mark.parametrize("error", [SlurmRejected("disabled"), SlurmMissing("no 'scontrol' on this machine")])
def test_where_requeue_is_refused_or_scontrol_is_missing_a_successor_waits_for_this_job_s_end(
    slurm: Slurm, tmp_path: Path, error: Exception
) -> None:
    run = run_of(tmp_path)
    slurm.answers(client, "requeue", no(error))
    assert leaves(run) == START_AGAIN
    assert slurm.calls[1:] == [("sbatch", run.script, ["--dependency=afterany:7"], "abc123-1")]
    assert [(event["event"], event.get("job_id")) for event in told(run, "submitting", "submitted", "stranded")][1:] == [
        ("submitting", None),
        ("submitted", "8"),
    ]
    # an element of an array has no script of its own until it must come back as a job of its own
    assert f"RUN_DIR={run.path}\n" in run.script.read_text()
    assert "array" not in read_directives(run.script.read_text())


def test_a_successor_may_last_as_long_as_the_ceiling_of_gpu_hours_leaves_it(slurm: Slurm, tmp_path: Path) -> None:
    run = run_of(tmp_path, "resilience.max_gpu_hours=1")
    slurm.answers(client, "requeue", no(SlurmRejected("disabled")))
    leaves(run)
    assert slurm.calls[1][2] == ["--time=00:15:00", "--dependency=afterany:7"]  # four GPUs


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(SlurmMissing("no 'sbatch'"), "submit_refused"), (SlurmUnreachable("timed out", True), "submit_failed")],
)
def test_where_not_even_a_successor_is_to_be_had_the_journal_says_so(
    slurm: Slurm, tmp_path: Path, error: Exception, outcome: str
) -> None:
    run = run_of(tmp_path)
    slurm.answers(client, "requeue", no(SlurmRejected("disabled")))
    slurm.answers(room, "sbatch", no(error))
    assert leaves(run) == START_AGAIN
    assert [event["event"] for event in told(run, "submit_refused", "submit_failed", "stranded")] == [outcome, "stranded"]
    # whether the job may exist all the same decides if it is looked for before the next submission
    assert (read_record(run).life.intent is None) == (outcome == "submit_refused")


def test_the_second_failure_in_a_row_puts_the_next_start_off(slurm: Slurm, tmp_path: Path) -> None:
    run = run_of(tmp_path, attempts=2)
    assert leaves(run, verdict=None, rc=137, heard="") == OK
    until = slurm.calls[-1][2]
    assert 50.0 < until - time.time() <= 60.0
    assert told(run, "put_off")[0]["until"] == until
    assert told(run, "hold_lifted") == []
    assert read_record(run).life.not_before == until


def test_a_run_that_is_given_up_names_the_reason_and_the_failing_ranks_last_lines(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, "resilience.max_attempts_without_progress=2", attempts=2)
    (run.attempt("7.0") / "error-rank0003.txt").write_text("Traceback ...\nMemoryError: 3 GiB\n")
    run.rank_log("7.0", 3).write_text("".join(f"line {number}\n" for number in range(100)))
    assert leaves(run, verdict=None, rc=1, heard="") == FAILED
    result = read(run.result)
    assert result["reason"] == "no progress in 2 attempts, the last one crashed: rank0003: MemoryError: 3 GiB"
    assert result["last_lines"] == ["attempts/7.0/rank-0003.log:", *(f"line {number}" for number in range(88, 100))]
    assert "line 99" in capsys.readouterr().out


def test_a_run_whose_gpu_hours_are_used_up_rests_saved(slurm: Slurm, tmp_path: Path) -> None:
    run = run_of(tmp_path, "resilience.max_gpu_hours=0.1")  # 90 s on four GPUs; 120 are needed to leave
    assert leaves(run) == OK
    assert slurm.calls == []
    ended = read_record(run).finished
    assert ended is not None
    assert (ended["event"], ended["state"]) == ("rested", "STOPPED")
    assert "resilience.max_gpu_hours=0.1 leaves no room for another attempt" in ended["reason"]


def test_a_job_that_no_longer_carries_the_run_does_not_bring_it_back(slurm: Slurm, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    Journal(run.journal).append("submitted", job_id="8", how="supervisor")
    assert leaves(run) == OK
    assert slurm.calls == []


def test_a_run_that_is_over_keeps_its_first_result(slurm: Slurm, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    finish(run, "CANCELLED", "cancelled by its user")
    leaves(run, verdict="completed")
    assert read(run.result)["state"] == "CANCELLED"
    assert len(told(run, "finished")) == 1


def test_on_a_machine_without_slurm_the_script_itself_waits_and_hears_a_cancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, "resilience.failure_backoff_s=0.3", attempts=2)
    here = Place("7.0", "7", 0, nodes=1, nodelist="here", scheduler="local")
    monkeypatch.setattr(room, "PAUSE_LOOK_S", 0.05)
    began = time.monotonic()
    assert depart(run, here, 1, frozenset()) == START_AGAIN
    assert time.monotonic() - began >= 0.25
    monkeypatch.setattr(room.time, "sleep", lambda seconds: Journal(run.journal).append("cancel_requested"))
    run.notice("7.0").unlink(missing_ok=True)
    assert room._pause(run, here, Journal(run.journal, "7.0"), time.time() + 60) == FAILED
    assert read(run.result)["state"] == "CANCELLED"


def test_steps_whose_lines_went_with_a_killed_rank_are_counted_as_lost(slurm: Slurm, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    Journal(run.journal, "7.0").append("checkpoint_saved", step=20)
    run.metrics.write_text(json.dumps({"attempt": "7.0", "step": 24, "t": 1.0}) + "\n")
    run.heartbeats("7.0").mkdir()
    (run.heartbeats("7.0") / "rank-0000").write_text("62 compute 9\n")
    leaves(run, verdict=None, rc=137, heard="")
    (ended,) = told(run, "attempt_ended")
    assert (ended["cause"], ended["last_step"], ended["steps_lost"]) == ("crashed", 61, 41)
