"""How a sweep's night is judged: what may not have happened is found, and nothing else."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.validate import validate
from hpcmoe.runs.create import Membership, create_run
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import finish
from hpcmoe.runs.sweep import SweepDir, SweepPoint, create_sweep
from tests.slurm.sweep_night import COUNT, RAISES, WORDS, Judgement, SweepNight

POINTS, STEPS, MOST = 4, 6, 2


class Told(SweepNight):
    """A night whose command line and Slurm say what the runs' directories do, but for ``lies``: job id -> sacct's words."""

    lies: dict[str, str]

    def hpcmoe(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        points = [
            {
                "point": index,
                "state": record.finished["state"] if record.finished else "RUNNING",
                "reason": record.finished and record.finished["reason"],
                "last_error": None,
            }
            for index, record in self.records().items()
        ]
        return subprocess.CompletedProcess(words, 1 if words[1] == "wait" else 0, json.dumps({"points": points}), "")

    def sacct(self, words: list[str]) -> SimpleNamespace:
        rows = []
        for record in self.records().values():
            good = record.finished is not None and record.finished["state"] == "COMPLETED"
            rows.append(f"{record.job_id}|" + self.lies.get(str(record.job_id), "COMPLETED|0:0" if good else "FAILED|1:0"))
        return SimpleNamespace(stdout="\n".join(rows))


def live(run: RunDir, point: int, job_id: str, scratch: Path) -> None:
    """One preemption in the middle, then the end."""
    state = run.checkpoints / "count"
    words = ["bash", str(scratch / "count.sh"), str(point), str(STEPS), "0"]
    out = subprocess.run(words, env={"HPCMOE_RUN_DIR": str(run.path)}, capture_output=True, text=True).stdout
    lines = [line.split() for line in out.splitlines()]
    for restart, (first, last) in enumerate(((0, 2), (2, STEPS))):
        journal = Journal(run.journal, f"{job_id}.{restart}")
        journal.append("attempt_started", job_id=job_id, restart=restart, engine="command")
        with run.metrics.open("a") as file:
            for number, (_, step, _, loss) in enumerate(lines[first:last]):
                line = {"step": int(step), "loss": float(loss), "attempt": journal.attempt, "t": 10.0 * restart + number}
                file.write(json.dumps(line) + "\n")
        journal.append("attempt_ended", cause="completed" if restart else "preempted")
    raised = point == RAISES
    assert raised != state.exists()
    finish(run, "FAILED" if raised else "COMPLETED", f"crashed: {WORDS}" if raised else None)


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    runs = tmp_path / "runs"
    sweep = create_sweep(runs / "sweeps" / "one", launcher="hpcmoe", root=runs, scheduler="slurm")
    (runs / "count.sh").write_text(COUNT)
    config = validate(load(["cluster=testbed", "engine=command", "engine.command=[true]"]))
    for index in range(POINTS):
        overrides = (f"+user.seed={index}",)
        run = create_run(replace(config, user={"seed": index}), overrides, runs, Membership(sweep.path, index, sweep.shared))
        sweep.append_points([SweepPoint(index, overrides, f"k{index}", run.run_id)])
        job_id = f"{40 + index // MOST}_{index % MOST}"
        Journal(run.journal).append("submitted", job_id=job_id, how="sweep")
        live(run, index, job_id, runs)
    for job in range(POINTS // MOST):
        sweep.journal("array_submitted", job_id=str(40 + job), points=[MOST * job, MOST * job + 1])
    found = Told(SimpleNamespace(), runs, None, random.Random(0), print, STEPS, sweep_id="one", submitted=POINTS)  # type: ignore[arg-type]
    found.lies = {}
    found.testbed = SimpleNamespace(run=found.sacct)  # type: ignore[assignment]
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return found


def wrong(night: Told, tmp_path: Path) -> list[str]:
    return Judgement(night, tmp_path / "scratch", MOST).wrong()


def test_a_night_in_which_each_point_ended_once_as_it_should_is_well(night: Told, tmp_path: Path) -> None:
    assert wrong(night, tmp_path) == []
    assert Judgement(night, tmp_path, MOST).preempted() == POINTS


def test_slurm_may_call_a_job_timed_out_that_was_done_while_it_was_taken_away(night: Told, tmp_path: Path) -> None:
    """Seen: done 2.5 s after its grace time, exit code 0, TIMEOUT."""
    night.lies = {"40_1": "TIMEOUT|0:0"}
    assert wrong(night, tmp_path / "of itself") == ["job 40_1 is TIMEOUT 0:0 in Slurm, and should be COMPLETED"]
    Journal(night.sweep.runs()[1].journal, "40_1.1").append("attempt_ended", cause="completed", preempt_time=10.0)
    assert wrong(night, tmp_path / "taken away") == []


def another_result(sweep: SweepDir) -> None:
    (sweep.runs()[0].checkpoints / "count").write_text("6 1\n")


def ended_twice(sweep: SweepDir) -> None:
    Journal(sweep.runs()[0].journal).append("finished", state="COMPLETED", reason=None)


def crashed(sweep: SweepDir) -> None:
    journal = Journal(sweep.runs()[1].journal, "40_1.2")
    for restart in (2, 3):
        journal.append("attempt_started", job_id="40_1", restart=restart)
        journal.append("attempt_ended", cause="crashed")
        journal = Journal(sweep.runs()[1].journal, "40_1.3")


def wrote_at_once(sweep: SweepDir) -> None:
    line: dict[str, Any] = {"step": 1, "loss": 0.0, "attempt": "40_0.0", "t": 1e9}
    with sweep.runs()[0].metrics.open("a") as file:
        file.write(json.dumps(line) + "\n")


def large_array(sweep: SweepDir) -> None:
    sweep.journal("array_submitted", job_id="50", points=[0, 1, 2])


def test_what_should_not_have_been_is_found(night: Told, tmp_path: Path) -> None:
    for happened in (another_result, ended_twice, crashed, wrote_at_once, large_array):
        happened(night.sweep)
    night.lies = {"41_1": "COMPLETED|0:0"}
    found = "\n".join(wrong(night, tmp_path))
    for words in (
        "point 0: ends with 6 1",
        "point 0: has 2 ends",
        "point 0: 40_0.0 and 40_0.1 wrote at once",
        "point 0: made a step again, with another result",
        "point 1: its attempts ended as ['completed', 'crashed'], and nothing but preemptions happened",
        "arrays of [2, 2, 3] elements",
        "job 41_1 is COMPLETED 0:0 in Slurm, and should be FAILED",
    ):
        assert words in found
    assert "point 2" not in found
