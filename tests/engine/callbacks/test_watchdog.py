"""A hang ends with the names of those who were waited for, and as something the batch shell brings back."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hpcmoe.config.schema import ResilienceConfig
from hpcmoe.engine import hang
from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.watchdog import Watchdog
from hpcmoe.files import read_json
from hpcmoe.runs.arrive import arrive
from hpcmoe.runs.depart import START_AGAIN, depart
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.place import this_place
from hpcmoe.runs.rundir import RunDir
from tests.engine.ranks import Attempt, events, make_run, small_config, write_text

AGREED = Agreed(1.0, 1, 0.0, 0.0, 1.0, None, False, False, False)  # type: ignore[arg-type]


class Rank:
    """A watchdog whose end can be awaited."""

    def __init__(self, run: RunDir, rank: int, ranks: int, timeout: float, startup: float = 60.0) -> None:
        self.left = threading.Event()
        self.codes: list[int] = []
        self.suspended = 0.0  # seconds that the process stood still
        self.watchdog = Watchdog(run, "job.0", rank, ranks, timeout, startup, self._leave, self._clock).start()

    def _clock(self) -> float:
        return time.monotonic() + self.suspended

    def _leave(self, code: int) -> None:
        self.codes.append(code)
        self.left.set()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.attempt("job.0").mkdir(parents=True)
    return run


def reason(run: RunDir) -> str:
    report = read_json(run.hang("job.0"))
    assert report is not None
    return str(report["reason"])


def test_the_lowest_living_rank_reports_once_and_all_leave_with_one_code(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = [Rank(run, rank, 4, timeout=1.0) for rank in (1, 2)]  # 0 never came, 3 is stopped
    hang.write_beat(ranks[0].watchdog.folder, 3, hang.Beat(5, "data", 9))
    for one, phase in zip(ranks, ("agree", "compute"), strict=True):
        one.watchdog.after_step(4, AGREED, None)
        one.watchdog.entering(5, phase)  # type: ignore[arg-type]
    assert all(one.left.wait(60) for one in ranks)
    assert [one.codes for one in ranks] == [[hang.EXIT_CODE]] * 2
    (event,) = events(run, "hang")
    named = [(one["rank"], one["step"], one["phase"], one["silent"]) for one in event["behind"]]
    assert named == [(0, None, None, True), (2, 5, "compute", False), (3, 5, "data", True)]
    assert reason(run) == event["reason"]
    line = next(line for line in capfd.readouterr().err.splitlines() if "hang" in line)
    assert line.startswith("rank 1: hang: no progress for ")
    for rank in (1, 2):
        stacks = (run.attempt("job.0") / f"stacks-rank{rank:04d}.txt").read_text()
        assert "test_the_lowest_living_rank_reports_once" in stacks, "where the main thread is"


def test_a_loop_that_moves_is_left_alone_and_so_is_one_that_starts_or_saves(run: RunDir) -> None:
    moving, starting, saving = (Rank(run, rank, 3, timeout=0.4) for rank in range(3))
    for one in (moving, saving):
        one.watchdog.after_step(1, AGREED, None)
    saving.watchdog.entering(2, "save")
    for step in range(20):
        moving.watchdog.entering(step, "compute")
        time.sleep(0.05)
    for one in (moving, starting, saving):
        one.watchdog.close()
        assert not one.codes
    assert not run.hang("job.0").exists()


def test_a_rank_that_starts_up_has_its_own_limit(run: RunDir) -> None:
    rank = Rank(run, 0, 1, timeout=0.2, startup=0.6)
    assert rank.left.wait(60)
    assert reason(run).endswith("all 1 ranks are in step 0, rendezvous")


def test_a_job_that_was_suspended_is_not_taken_for_a_hang(run: RunDir) -> None:
    rank = Rank(run, 0, 1, timeout=4.0)
    rank.watchdog.after_step(1, AGREED, None)
    rank.watchdog.entering(2, "compute")
    rank.suspended = 3600.0
    assert not rank.left.wait(2.0), "it has its whole time again"
    assert not run.hang("job.0").exists()
    assert rank.left.wait(60), "and no more than that"


@pytest.mark.multiprocess
def test_a_stopped_rank_is_named_and_the_run_comes_back(tmp_path: Path) -> None:
    """Rank 0 is stopped, the one that has the ranks' store."""
    limits = ResilienceConfig(hang_timeout_s=12.0, hang_startup_timeout_s=120.0)
    config = small_config(write_text(tmp_path / "text"), 2, 2, 100_000, resilience=limits)
    run = make_run(tmp_path / "run", config)
    Journal(run.journal).append("planned", name="x", cluster="test", nodes=1, gpus_per_node=2, steps=100_000)
    place = this_place({"HPCMOE_ATTEMPT": f"local-{os.getpid()}.0"})
    arrive(run, place)
    attempt = Attempt(run, place.attempt, 2)
    attempt.wait_for(lambda: run.metrics.exists() and len(run.metrics.read_text().splitlines()) > 2)
    attempt.signal(0, signal.SIGSTOP)
    attempt.ranks[1].join(120)
    attempt.signal(0, signal.SIGKILL)
    assert attempt.ranks[1].exitcode == hang.EXIT_CODE, attempt.log()
    (event,) = events(run, "hang")
    assert [(one["rank"], one["silent"]) for one in event["behind"]] == [(0, True)]
    assert f"rank 1: hang: {event['reason']}" in attempt.log()
    folder = run.attempt(place.attempt)
    assert "File" in (folder / "stacks-rank0001.txt").read_text()
    assert json.loads((folder / "collectives-gloo-rank0001.json").read_text())["entries"]

    assert depart(run, place, hang.EXIT_CODE, frozenset()) == START_AGAIN
    (ended,) = events(run, "attempt_ended")
    assert (ended["cause"], ended["detail"]) == ("hang", event["reason"])
