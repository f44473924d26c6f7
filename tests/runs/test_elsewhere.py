"""A local run whose processes are on another host of a shared file system is not started twice, and nobody here is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.errors import UserError
from hpcmoe.runs.claim import take_claim
from hpcmoe.runs.control import cancel, resume, see
from hpcmoe.runs.elsewhere import FRESH_S, GONE_S
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.place import Place
from hpcmoe.runs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Started on another host, whose process ids mean nothing here."""
    run = RunDir(tmp_path / "abc123")
    run.control.mkdir(parents=True)
    run.config.write_text("resilience: {}\ncluster: {scheduler: local}\n")
    journal = Journal(run.journal)
    journal.append("planned", run_id="abc123", scheduler="local", steps=60)
    journal.append("submitted", job_id=f"local-{os.getpid()}", how="submit", host="laptop", start_ticks=1)
    Journal(run.journal, f"local-{os.getpid()}.0").append("attempt_started", job_id=f"local-{os.getpid()}", restart=0)
    monkeypatch.setattr("hpcmoe.runs.create.submit_run", lambda *given, **more: "local-77")
    monkeypatch.setattr("hpcmoe.config.freeze.load_frozen", lambda path: None)
    monkeypatch.setattr("hpcmoe.runs.elsewhere.LOOK_AGAIN_AFTER_S", 0.0)
    return run


def beat(run: RunDir, age_s: float, rank: int = 0) -> None:
    [attempt] = [event["attempt"] for event in read_journal(run.journal) if event["event"] == "attempt_started"]
    path = run.heartbeats(str(attempt)) / f"rank-{rank:04d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("3 compute 9\n")
    os.utime(path, (time.time() - age_s,) * 2)


def claim_of_the_other_host(run: RunDir) -> dict[str, Any]:
    attempt = f"local-{os.getpid()}.0"
    run.claim.write_text(f'{{"job_id": "local-{os.getpid()}", "attempt": "{attempt}", "ticks": 1, "host": "laptop"}}')
    return {"attempt": "local-77.0", "job_id": "local-77", "restart": 0, "nodes": 1, "nodelist": "here", "scheduler": "local"}


def test_while_its_heartbeats_are_fresh_it_runs_and_is_neither_resumed_nor_cancelled_here(run: RunDir) -> None:
    beat(run, GONE_S + 60)
    beat(run, 8.0, rank=1)
    seen = see(run)
    assert (seen.state, (seen.reason or "")[:29]) == ("RUNNING", "on laptop, last sign of life ")
    with pytest.raises(UserError, match=r"not resumed: its processes are on laptop, last sign of life .*stop it there"):
        resume(run)
    with pytest.raises(
        UserError,
        match=r"not cancelled: its processes are on laptop, .*cancel it there, or have it stop with `touch .*/control/stop`",
    ):
        cancel(run)  # the process of that id on this host is this very test
    assert "cancel_requested" not in {event["event"] for event in read_journal(run.journal)}


@pytest.mark.parametrize("age", [None, FRESH_S + 60.0])
def test_what_cannot_be_judged_is_unknown_and_left_alone_until_its_user_says_that_it_is_gone(
    run: RunDir, age: float | None
) -> None:
    if age is not None:
        beat(run, age)
    seen = see(run)
    assert (seen.state, seen.last_known) == ("UNKNOWN", "RUNNING")
    assert "its processes are on laptop" in (seen.reason or "")
    with pytest.raises(UserError, match="if they are gone, `hpcmoe resume abc123 --take-over` continues it here"):
        resume(run)
    assert resume(run, take_over=True) == "local-77"


def test_once_its_heartbeats_are_old_it_is_resumed_and_takes_the_claim(run: RunDir) -> None:
    beat(run, GONE_S + 60.0)
    there = claim_of_the_other_host(run)
    assert resume(run) == "local-77"
    assert take_claim(run, Place(**there))


def test_a_job_that_starts_while_the_other_host_trains_leaves(run: RunDir) -> None:
    there = claim_of_the_other_host(run)
    assert not take_claim(run, Place(**there)), "nobody has said that it is gone"
    beat(run, 5.0)
    assert not take_claim(run, Place(**there))
    resume(run, take_over=True)
    assert take_claim(run, Place(**there))


def test_what_was_closed_on_its_own_host_may_be_resumed_on_another(run: RunDir) -> None:
    there = claim_of_the_other_host(run)  # only the job itself hands it back, and that died
    Journal(run.journal, f"local-{os.getpid()}.0").append("attempt_ended", cause="unknown")
    Journal(run.journal).append("finished", state="CANCELLED", reason="cancelled by its user")
    assert resume(run) == "local-77"
    assert take_claim(run, Place(**there))


def test_while_its_heartbeats_go_on_it_is_not_taken_over_whatever_its_user_believes(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(run, FRESH_S + 60.0)
    [path] = run.heartbeats(f"local-{os.getpid()}.0").iterdir()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("hpcmoe.runs.elsewhere.time.sleep", lambda seconds: path.write_text("3 compute 10\n"))
        with pytest.raises(UserError, match=r"not taken over: its heartbeats from laptop go on; stop it there, or with `touch "):
            resume(run, take_over=True)
    assert [event["event"] for event in read_journal(run.journal)][-1] == "attempt_started"
    assert resume(run, take_over=True) == "local-77"


def test_a_run_whose_host_died_before_its_attempt_was_journalled_may_be_taken_over(run: RunDir) -> None:
    there = claim_of_the_other_host(run)
    started = next(line for line in run.journal.read_text().splitlines(keepends=True) if "attempt_started" in line)
    run.journal.write_text(run.journal.read_text().replace(started, ""))
    assert resume(run, take_over=True) == "local-77"
    assert take_claim(run, Place(**there))
