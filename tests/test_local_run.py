"""Without Slurm and without a GPU: the same commands, the same life. Real ranks on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.runs.journal import iter_json_lines, read_journal

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]

REPO = Path(__file__).resolve().parents[1]
STEPS = 24
Losses = dict[int, set[float]]
RUN = [
    "cluster=local",
    "gpus_per_node=2",
    f"train.steps={STEPS}",
    "train.seq_len=32",
    "train.global_batch_tokens=1024",
    "checkpoint.interval=6",
    "resilience.kill_wait_s=10",
    "logging.tensorboard=false",
]


class Desk:
    """A person with a laptop: runs `hpcmoe` in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = f"{REPO}{os.pathsep}{REPO / 'launchers'}"
        self.env = {**os.environ, "HPCMOE_RUNS": str(folder / "my runs"), "PYTHONPATH": path}

    def hpcmoe(self, *words: str, rc: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "hpcmoe", *words], capture_output=True, text=True, env=self.env, cwd=self.folder, timeout=600
        )
        assert done.returncode == rc, f"hpcmoe {' '.join(words)} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: str, rc: int = 0) -> Any:
        return json.loads(self.hpcmoe(*words, "--json", rc=rc).stdout)

    def submit(self, *words: str) -> Path:
        return Path(self.json("submit", *RUN, *words)["run_dir"])

    def status(self, run: Path) -> Any:
        return self.json("status", run.name)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("a desk with $PATH in 'its' name")
    return Desk(folder)


@pytest.fixture(scope="module")
def untouched(desk: Desk) -> dict[int, set[float]]:
    """The losses of a run to which nothing happens; with --wait it tells its progress and exits with its result."""
    done = desk.hpcmoe("submit", *RUN, "--wait")
    for words in (f"step {STEPS}/{STEPS}", "loss", "tokens/s", "MFU", "titan", "experts max/mean", "left", "is COMPLETED"):
        assert words in done.stdout
    run = Path(desk.json("status")["runs"][-1]["run_dir"])
    found = losses(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def losses(run: Path) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for line in iter_json_lines(run / "metrics.jsonl"):
        found.setdefault(line["step"], set()).add(line["loss"])
    return found


def until(what: str, true: Callable[[], bool], timeout: float = 300.0) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.1)


def until_step(run: Path, step: int) -> None:
    until(f"step {step}", lambda: max(losses(run), default=0) >= step)


def rank_pids(run: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "hpcmoe.engine" in words and str(run) in words:
                found.append(int(entry.name))
    return sorted(found)


def test_a_run_that_is_saved_killed_and_stopped_by_others_ends_as_if_nobody_had_touched_it(desk: Desk, untouched: Losses) -> None:
    run = desk.submit("checkpoint.interval=12")
    (run / "control" / "save").touch()  # before the first step, as a run does not wait for us
    until("the file's removal", lambda: not (run / "control" / "save").exists())
    assert saved_steps(run)[0] < 12

    until_step(run, saved_steps(run)[0] + 1)
    os.kill(rank_pids(run)[-1], signal.SIGKILL)
    until("the run's return", lambda: count(run, "attempt_started") == 2)
    until("its first step", lambda: count(run, "first_step") == 2)
    (run / "control" / "stop").touch()
    assert desk.json("wait", run.name, rc=4)["state"] == "STOPPED"
    assert rank_pids(run) == []
    desk.hpcmoe("resume", run.name)
    status = desk.json("wait", run.name)
    killed, stopped, last = status["attempts"]
    assert (status["state"], killed["cause"], stopped["cause"], last["cause"]) == ("COMPLETED", "crashed", "stopped", "completed")
    assert killed["steps_lost"] == killed["last_step"] - stopped["resumed_from"]
    assert stopped["resumed_from"] in saved_steps(run)
    assert stopped["steps_lost"] == 0
    assert losses(run) == untouched


def test_a_cancelled_run_has_saved_is_gone_and_stays_cancelled(desk: Desk) -> None:
    run = desk.submit("train.steps=1000000")
    until_step(run, 2)
    assert desk.json("cancel", run.name)["state"] == "CANCELLED"
    assert rank_pids(run) == []
    status = desk.status(run)
    assert (status["state"], status["attempts"][0]["steps_lost"]) == ("CANCELLED", 0)
    assert "CANCELLED already" in desk.hpcmoe("cancel", run.name, rc=2).stderr


def test_a_run_that_dies_again_and_again_without_progress_is_given_up(desk: Desk) -> None:
    run = desk.submit("checkpoint.interval=0", "resilience.max_attempts_without_progress=2")
    for attempt in range(2):
        until("the ranks' start", lambda attempt=attempt: count(run, "attempt_started") > attempt and len(rank_pids(run)) == 2)  # type: ignore[misc]
        os.kill(rank_pids(run)[0], signal.SIGKILL)
        until("the attempt's end", lambda attempt=attempt: count(run, "attempt_ended") > attempt)  # type: ignore[misc]
    status = desk.json("wait", run.name, rc=1)
    assert status["state"] == "FAILED"
    assert "no progress in 2 attempts" in status["reason"]


def saved_steps(run: Path) -> list[int]:
    return [event["step"] for event in read_journal(run / "events.jsonl") if event["event"] == "checkpoint_saved"]


def count(run: Path, name: str) -> int:
    return sum(event["event"] == name for event in read_journal(run / "events.jsonl"))
