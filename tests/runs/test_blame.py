"""Attempts that die on one node: what is journalled, what is asked of Slurm, and whose budget it costs. Slurm is played."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.freeze import freeze
from hpcmoe.config.validate import validate
from hpcmoe.files import write_json
from hpcmoe.runs.arrive import arrive
from hpcmoe.runs.blame import exclude_flag, excluded_by
from hpcmoe.runs.depart import OK, START_AGAIN, depart
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.place import Place
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import raw_config, result_state
from tests.hpcmoe_slurm.fakes import FakeSlurm

NO_MOUNT = "Traceback (most recent call last):\nFileNotFoundError: [Errno 2] No such file or directory: '/scratch/text'\n"
PEER_GONE = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [10.0.0.2]:5\n"
SCONTROL = """
case "$*" in
  requeue*) echo PENDING >{state} ;;
  "show job"*) printf 'JobId=7 JobName=x\\n   JobState=%s Reason=None\\n' "$(cat {state})" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.runs("scontrol", SCONTROL.format(state=tmp_path / "state"))
    fake.answers("sacct")
    fake.answers("squeue")
    return fake


def a_run(folder: Path, *overrides: str) -> RunDir:
    run = RunDir(folder / "run")
    run.control.mkdir(parents=True)
    common = ["cluster=testbed", "nodes=2", "gpus_per_node=2", "slurm.exclude=n0009", "cluster.nodes=null"]
    freeze(validate(load([*common, *overrides])), run.config)
    Journal(run.journal).append("planned", scheduler="slurm", run_id="run")
    Journal(run.journal).append("submitted", job_id="7", how="submit")
    return run


def die(run: RunDir, restart: int, nodelist: str, errors: dict[int, str]) -> int:
    """One attempt whose ranks leave these tracebacks before their first step; the job's exit code."""
    (run.path.parent / "state").write_text("RUNNING")
    place = Place(f"7.{restart}", "7", restart, 2, nodelist, "slurm")
    assert arrive(run, place) == 0
    for rank, text in errors.items():
        (run.attempt(place.attempt) / f"error-rank{rank:04d}.txt").write_text(text)
    return depart(run, place, 1, frozenset())


def causes(run: RunDir) -> list[str]:
    return [event["cause"] for event in read_journal(run.journal) if event["event"] == "attempt_ended"]


def updates(slurm: FakeSlurm) -> list[str]:
    return [call.rpartition(" ")[2] for call in slurm.calls("scontrol") if "ExcNodeList" in call]


def test_a_node_on_which_everything_dies_is_left_out_and_does_not_use_up_the_run_s_attempts(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = a_run(tmp_path, "resilience.max_attempts_without_progress=3")
    for restart in range(4):  # Slurm does not keep to it, and gives the same nodes again and again
        assert die(run, restart, "n[0001-0002]", {0: PEER_GONE, 2: NO_MOUNT, 3: NO_MOUNT}) == OK
    assert causes(run) == ["crashed"] + ["node_failure"] * 3
    assert result_state(run) is None
    assert excluded_by(run, raw_config(run)) == ["n0002"]
    assert updates(slurm) == ["ExcNodeList=n0009,n0002"], "asked once, with the user's own"
    assert exclude_flag(run, raw_config(run)) == ["--exclude=n0009,n0002"]
    ended = [event for event in read_journal(run.journal) if event["event"] == "attempt_ended"]
    assert ended[-1]["detail"].startswith("node n0002: rank 2: FileNotFoundError")


def test_a_program_that_dies_everywhere_uses_up_its_attempts_and_no_node_stays_blamed(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = a_run(tmp_path, "resilience.max_attempts_without_progress=3")
    codes = [
        die(run, 0, "n[0001-0002]", {0: PEER_GONE, 2: NO_MOUNT}),
        die(run, 1, "n[0001-0002]", {0: PEER_GONE, 2: NO_MOUNT}),
        die(run, 2, "n[0001,0003]", {0: PEER_GONE, 2: NO_MOUNT}),
        die(run, 3, "n[0003-0004]", {0: PEER_GONE, 2: NO_MOUNT}),
    ]
    assert causes(run) == ["crashed", "node_failure", "crashed", "crashed"]
    assert (codes[-1], result_state(run)) == (1, "FAILED")
    assert excluded_by(run, raw_config(run)) == []
    assert updates(slurm) == ["ExcNodeList=n0009,n0002", "ExcNodeList=n0009"]


def test_a_node_with_silent_ranks_is_left_out_at_once(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = a_run(tmp_path)
    (tmp_path / "state").write_text("RUNNING")
    place = Place("7.0", "7", 0, 2, "n[0001-0002]", "slurm")
    assert arrive(run, place) == 0
    behind: list[dict[str, Any]] = [{"rank": 3, "step": 5, "phase": "compute", "silent": True}]
    write_json(run.hang("7.0"), {"behind": behind, "reason": "no progress for 9 s"})
    assert depart(run, place, 75, frozenset()) == OK
    (blame,) = [event for event in read_journal(run.journal) if event["event"] == "node_blamed"]
    assert (blame["node"], blame["why"], blame["sure"]) == ("n0002", "hang", True)
    assert causes(run) == ["node_failure"]
    assert updates(slurm) == ["ExcNodeList=n0009,n0002"]


def test_the_node_that_slurm_lost_is_found_when_the_next_attempt_starts(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = a_run(tmp_path)
    (tmp_path / "state").write_text("RUNNING")
    assert arrive(run, Place("7.0", "7", 0, 2, "n[0001-0002]", "slurm")) == 0  # and its batch host dies
    begun = time.strftime("%Y-%m-%dT%H:%M:%S")
    row = ["7", "NODE_FAIL", "1:0", begun, begun, begun, "9", "billing=1", "n[0001-0002]", "x"]
    slurm.answers("sacct", "\x1f".join(row) + "\n")
    slurm.answers("sinfo", "n0001\x1fdown*\x1fNot responding\nn0001\x1fdown*\x1fNot responding\nn0002\x1fmixed\x1fnone\n")
    assert arrive(run, Place("7.1", "7", 1, 2, "n[0002-0003]", "slurm")) == 0
    ended = next(event for event in read_journal(run.journal) if event["event"] == "attempt_ended")
    assert ended["cause"] == "node_failure"
    assert ended["detail"].endswith("; node n0001: down*: Not responding")
    assert excluded_by(run, raw_config(run)) == ["n0001"]


def test_where_requeue_is_refused_the_successor_stays_away_from_the_node(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = a_run(tmp_path, "resilience.strikes_to_exclude=1")
    run.script.parent.mkdir()
    run.script.write_text("#!/bin/bash\n#SBATCH --exclude=n0009\n")
    slurm.runs("scontrol", SCONTROL.format(state=tmp_path / "state").replace("echo PENDING >", "exit 1 #"))
    slurm.answers("sbatch", "8\n")
    assert die(run, 0, "n[0001-0002]", {0: PEER_GONE, 2: NO_MOUNT}) == START_AGAIN
    assert "--exclude=n0009,n0002" in slurm.calls("sbatch")[0].split()


def test_exclusion_can_be_switched_off(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = a_run(tmp_path, "resilience.exclude_for_s=0", "resilience.max_attempts_without_progress=3")
    for restart in range(3):
        die(run, restart, "n[0001-0002]", {0: PEER_GONE, 2: NO_MOUNT})
    assert causes(run) == ["crashed"] * 3
    assert result_state(run) == "FAILED"
    assert updates(slurm) == []


def test_a_node_that_the_preflight_left_out_is_not_blamed_for_what_happens_without_it(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = a_run(tmp_path, "nodes=2", "spare_nodes=1", "resilience.preflight=true")
    (tmp_path / "state").write_text("RUNNING")
    place = Place("7.0", "7", 0, 3, "n[0001-0003]", "slurm")
    assert arrive(run, place) == 0
    Journal(run.journal, "7.0").append("node_blamed", node="n0001", why="preflight", evidence="rank 0: matmul: slow", sure=True)
    run.ranks_on("7.0").write_text("2 n0002 n0001\n")
    (run.attempt("7.0") / "error-rank0002.txt").write_text(NO_MOUNT)  # of the ranks that started: on n0003
    (run.attempt("7.0") / "error-rank0000.txt").write_text(PEER_GONE)
    assert depart(run, place, 1, frozenset()) == OK
    assert causes(run) == ["crashed"]
    blames = [(event["node"], event["sure"]) for event in read_journal(run.journal) if event["event"] == "node_blamed"]
    assert blames == [("n0001", True), ("n0003", False)]
    assert updates(slurm) == ["ExcNodeList=n0009,n0001"]
