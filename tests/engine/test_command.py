"""One task of a run that trains with a command: real processes, their signals, process groups and last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.freeze import freeze
from hpcmoe.config.validate import validate
from hpcmoe.engine.command import judge
from hpcmoe.files import read_json
from hpcmoe.runs.journal import Journal, iter_json_lines, read_journal
from hpcmoe.runs.rundir import RunDir

ATTEMPT = "local-1.0"
PATIENCE_S = 60.0


class Task:
    """A run of one task whose command is a bash text."""

    def __init__(self, folder: Path) -> None:
        self.run, self.folder = RunDir(folder / "run"), folder
        for path in (self.run.control, self.run.attempt(ATTEMPT)):
            path.mkdir(parents=True)

    def start(self, script: str, *overrides: str, world: int = 1, **engine: Any) -> subprocess.Popen[bytes]:
        config = load(["cluster=local", f"gpus_per_node={world}", "engine=command", "resilience.kill_wait_s=5", *overrides])
        config.engine.command, config.engine.chdir = script, str(self.folder)
        for name, value in engine.items():
            setattr(config.engine, name, value)
        freeze(validate(config), self.run.config)
        env = {**os.environ, "HPCMOE_ATTEMPT": ATTEMPT, "RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}
        with self.log.open("wb") as log:
            words = [sys.executable, "-m", "hpcmoe.engine.command", str(self.run.path)]
            return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def finish(self, script: str, **engine: Any) -> int:
        return self.start(script, **engine).wait(PATIENCE_S)

    @property
    def log(self) -> Path:
        return self.run.rank_log(ATTEMPT, 0)

    @property
    def verdict(self) -> Any:
        return read_json(self.run.verdict(ATTEMPT))

    @property
    def error(self) -> str:
        return (self.run.attempt(ATTEMPT) / "error-rank0000.txt").read_text(encoding="utf-8")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_journal(self.run.journal) if event["event"] == name]

    def until_said(self, word: str) -> None:
        until(lambda: word in self.log.read_text(encoding="utf-8"))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path)


def test_a_command_that_ends_well_has_completed_the_run(task: Task) -> None:
    assert task.finish("exit 0") == 0
    assert (task.verdict["verdict"], task.verdict["source"]) == ("completed", None)


def test_a_failing_command_leaves_its_exit_code_and_its_last_lines(task: Task) -> None:
    assert task.finish("echo one; echo no such corpus >&2; exit 7") == 7
    assert task.verdict is None
    assert task.error.splitlines() == ["one", "no such corpus", "the command left with exit code 7: no such corpus"]


def test_a_command_that_is_killed_says_by_which_signal(task: Task) -> None:
    assert task.finish("kill -SEGV $$") == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV" in task.error


@pytest.mark.parametrize("sent", [signal.SIGUSR2, signal.SIGTERM])
def test_whatever_asks_the_run_to_leave_the_command_hears_its_own_stop_signal_once(task: Task, sent: signal.Signals) -> None:
    process = task.start("trap 'echo saved' USR1; sleep 60 & echo up; wait; wait; exit 0", stop_signal="USR1")
    task.until_said("up")
    process.send_signal(sent)
    assert process.wait(PATIENCE_S) == 0
    assert (task.verdict["verdict"], task.verdict["source"]) == ("leave", "signal")
    assert task.log.read_text().count("saved") == 1


def test_a_command_without_a_handler_leaves_by_the_signal(task: Task) -> None:
    process = task.start("echo up; sleep 60", stop_signal="INT")  # which shells ignore for what they start in the background
    task.until_said("up")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(PATIENCE_S) == 0
    assert task.verdict["verdict"] == "leave"


def test_the_run_waits_for_a_training_that_outlives_its_shell(task: Task) -> None:
    inner = "trap 'sleep 1; echo saved; exit' TERM; echo up; while :; do sleep 0.1; done"
    process = task.start(f'bash -c "{inner}" & wait')
    task.until_said("up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert "saved" in task.log.read_text()
    assert task.verdict["verdict"] == "leave"


def test_what_a_command_leaves_running_is_told_to_go(task: Task) -> None:
    assert task.finish("sleep 60 & echo $! >child; exit 0") == 0
    pid = int((task.folder / "child").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_control_stop_stops_it_whatever_its_exit_code(task: Task) -> None:
    process = task.start("trap 'exit 3' TERM; echo up; sleep 60 & wait")
    task.until_said("up")
    (task.run.control / "stop").touch()
    assert process.wait(PATIENCE_S) == 0
    assert task.verdict["verdict"] == "stopped"
    assert "exit code 3" in task.verdict["reason"]


def test_a_request_that_came_before_it_could_start_is_heeded(task: Task) -> None:
    task.run.notice(ATTEMPT).touch()
    assert task.finish("echo started") == 0
    assert (task.verdict["verdict"], task.log.read_text()) == ("leave", "")


def test_a_command_that_does_not_exist_is_one_clear_line(task: Task) -> None:
    assert task.start("true", command=["no-such-program"]).wait(PATIENCE_S) == 2
    assert task.verdict["verdict"] == "failed"
    assert task.verdict["reason"].startswith("engine.command: there is no program 'no-such-program'")


def test_the_command_knows_its_place_and_whether_it_starts_for_the_first_time(task: Task) -> None:
    Journal(task.run.journal, "local-1.9").append("attempt_started", job_id="local-1", restart=9)
    assert (
        task.finish("echo $RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $HPCMOE_RUN_ID $HPCMOE_RESTARTS $HPCMOE_FIRST_START") == 0
    )
    assert task.log.read_text().split() == ["0/1", "127.0.0.1:23456", "run", "1", "0"]


def test_steps_are_read_from_the_log_whatever_colours_it_has(task: Task) -> None:
    log = r"printf '\033[31mstep:  1  \033[32mloss:  8.25\033[0m\n 50%%\rstep: 20 loss: nan tps: 1,234'"
    pattern = r"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)(?: tps: (?P<tokens_per_s>\S+))?"
    assert task.finish(log, progress=pattern) == 0
    lines = list(iter_json_lines(task.run.metrics))
    assert [(line["step"], line.get("loss"), line.get("tokens_per_s")) for line in lines] == [(1, 8.25, None), (20, None, 1234.0)]
    assert [event["step"] for event in task.events("first_step")] == [1]
    assert len(task.events("progressed")) == 1


def test_steps_that_were_reached_before_are_no_progress(task: Task) -> None:
    task.run.metrics.write_text('{"step": 20, "attempt": "local-1.9", "t": 0}\n')
    assert task.finish("echo step 20", progress=r"step (?P<step>\d+)") == 0
    assert task.events("progressed") == []


def test_with_a_pattern_for_checkpoints_only_a_new_one_is_progress(task: Task) -> None:
    (task.folder / "out").mkdir()
    (task.folder / "out" / "step-1").touch()
    words: dict[str, Any] = {"progress": r"step (?P<step>\d+)", "checkpoint_glob": "out/step-*"}
    assert task.finish("echo step 9", **words) == 0
    assert task.events("progressed") == []
    assert task.finish("echo step 9; sleep 0.05; touch out/step-9", **words) == 0
    assert [event["checkpoint"] for event in task.events("progressed")] == ["out/step-9"]


def test_a_shells_own_code_for_the_signal_counts_as_leaving() -> None:
    assert judge(128 + signal.SIGTERM, "signal", signal.SIGUSR1).verdict == "leave"
    assert judge(1, "signal", signal.SIGTERM).verdict is None
    assert judge(-signal.SIGKILL, "signal", signal.SIGTERM).exit_code == 137
