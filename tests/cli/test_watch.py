"""The live view: what it shows in 80 columns, and what its keys do in a real (pseudo) terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpcmoe.cli import watch
from hpcmoe.cli.keys import keys_in
from hpcmoe.cli.screen import frame, when
from hpcmoe.config.compose import compose, to_config
from hpcmoe.config.freeze import freeze
from hpcmoe.errors import UserError
from hpcmoe.runs.board import Board, Line
from hpcmoe.runs.glance import glance
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.life import JobView
from hpcmoe.runs.observe import view
from hpcmoe.runs.place import process_start_ticks
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import Record
from hpcmoe.slurm.facts import SEPARATOR
from hpcmoe.slurm.places import QueuePlace
from tests.hpcmoe_slurm.fakes import FakeSlurm

NOW = 1_796_000_000.0
LONGEST_NAME = "a_name_that_somebody_chose_for_a_sweep_of_learning_rates"


def line(state: str, step: int = 1234, steps: int = 20000, name: str = "moe", **metrics: Any) -> Line:
    events = [
        {"t": NOW - 9000, "event": "planned", "attempt": None, "name": name, "steps": steps},
        {"t": NOW - 8000, "event": "submitted", "attempt": None, "job_id": "4711"},
        {"t": NOW - 7200, "event": "attempt_started", "attempt": "4711.0", "job_id": "4711", "restart": 0, "gpus": 64},
    ]
    figures = {"step": step, "loss": 2.34567, "tokens_per_s": 1_234_567.0, "mfu": 0.415, "seconds": 3.0, "t": NOW - 4, **metrics}
    seen = view(Record(RunDir(Path("/runs/abc123")), events, [figures]), JobView(state, "Priority", NOW + 3600), NOW)
    place = QueuePlace(12, 40, only_own=False) if state == "PENDING" else None
    return Line(glance(seen, NOW), seen, place, NOW + 3600 if place else None)


def shown(lines: list[Line], width: int, selected: int | None = None, rows: int = 15) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(frame(lines, NOW, width, rows, selected))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_every_run_is_one_row_of_whole_figures_in_any_width(width: int) -> None:
    lines = [line("RUNNING"), line("PENDING"), line("RUNNING", step=987_654, steps=1_000_000, name=LONGEST_NAME, loss=123.456)]
    text = shown(lines, width, selected=1)
    assert max(map(len, text)) <= width
    rows = [row for row in text if "/20000" in row or " 98% " in row]
    assert len(rows) == 3
    assert rows[0].split()[2:10] == ["RUNNING", "1", "1234/20000", "1.23M", "41.5", "2.3457", "128.0", "15h38m"]
    assert rows[1].split()[:9] == [">", "abc123", "moe", "QUEUED", "1", "1234/20000", "-", "-", "2.3457"]
    assert rows[1].split()[10:12] == ["#12", when(NOW + 3600, NOW)]
    assert "987654 98%" in rows[2]
    assert "123.45" in rows[2]
    about = next(row for row in text if row.startswith("abc123 moe: job 4711"))
    assert "place 12 of 40" in about or width == 80


def test_a_long_list_is_cut_around_the_selected_run_and_says_so() -> None:
    text = shown([line("RUNNING", step=number) for number in range(100)], 80, selected=50, rows=10)
    steps = [row.split("/")[0].split()[-1] for row in text if "/20000" in row]
    assert steps == [str(step) for step in range(45, 55)]
    assert "46 to 55 of 100 runs" in text[0]


def test_what_is_unknown_is_shown_as_that() -> None:
    events = [{"t": NOW - 90, "event": "planned", "attempt": None}, {"t": NOW - 60, "event": "submitted", "job_id": "7"}]
    seen = view(Record(RunDir(Path("/runs/abc123")), events, []), JobView(reachable=False, problem="squeue: no answer"), NOW)
    text = shown([Line(glance(seen, NOW), seen)], 120, selected=0)
    assert "0/?" in text[2]
    assert "UNKNOWN: last known QUEUED, 1m00s ago; squeue: no answer" in "\n".join(text)


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"jk", ["j", "k"]),
        (b"\x1b[A\x1bOB\x1b[6~", ["up", "down", "page down"]),
        (b"\r\n", ["enter", "enter"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[1;5Cq", ["q"]),  # Ctrl-right, which is no key here
        (b"\x1bxq", ["q"]),  # Alt-x
        (b"\x1b[", []),
    ],
)
def test_keys_are_told_apart(typed: bytes, keys: list[str]) -> None:
    assert keys_in(typed) == keys


# ---- polls ------------------------------------------------------------------------------------------------------------


def row(*cells: str) -> str:
    return SEPARATOR.join(cells) + "\n"


def test_a_waiting_run_has_its_place_and_the_start_that_slurm_expects_and_no_poll_asks_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(tmp_path / "bin", monkeypatch)
    runs = []
    for job_id in ("7", "8"):
        run = RunDir(tmp_path / f"run{job_id}")
        run.path.mkdir()
        Journal(run.journal).append("planned", steps=9)
        Journal(run.journal).append("submitted", job_id=job_id)
        runs.append(run)
    now = time.time()
    job = row("7", "PENDING", "Priority", f"{now:.0f}", f"{now + 600:.0f}", "N/A", "1", "", "me", "x", "")
    queue = [
        ("9", "a", "50", "Priority", "you"),
        ("7", "a,b", "10", "Priority", "me"),
        ("6_[0-99]", "b", "90", "Resources", "you"),
    ]
    queue += [("5", "c", "99", "Priority", "you"), ("4", "a", "99", "JobHeldUser", "you"), ("3", "b", "1", "Priority", "you")]
    slurm.runs(
        "squeue",
        f"if [[ $* == *PENDING* ]]; then printf '%s' '{''.join(row(*cells) for cells in queue)}'; else printf '%s' '{job}'; fi",
    )
    slurm.answers("sacct")
    board = Board(lambda: runs)
    asked = []
    for _ in range(3):
        before = len(slurm.calls("squeue")) + len(slurm.calls("sacct"))
        lines = board.poll(now)
        asked.append(len(slurm.calls("squeue")) + len(slurm.calls("sacct")) - before)
    assert asked == [2, 2, 1]
    waiting = next(line for line in lines if line.run.run_id == "run7")
    assert waiting.place == QueuePlace(3, 4, only_own=False)
    assert waiting.starts == float(f"{now + 600:.0f}")
    assert waiting.as_json()["place_of"] == 4


# ---- the command ------------------------------------------------------------------------------------------------------


def test_without_a_terminal_it_looks_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path))
    assert watch.main([]) == 0
    said = capsys.readouterr()
    assert "no runs yet" in said.out
    assert "no terminal here" in said.err
    assert watch.main(["--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []


@pytest.mark.parametrize("wrong", ["0", "0.5", "nan", "-3"])
def test_a_look_more_often_than_once_a_second_is_refused(wrong: str) -> None:
    with pytest.raises(UserError, match="at least 1 s"):
        watch.main([f"--interval={wrong}"])


PATIENCE_S = 300.0  # a machine that is busy with other work must not fail a test


class Terminal:
    """`hpcmoe watch` in a pseudo terminal of 80 x 24."""

    def __init__(self, root: Path) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        environ = {**os.environ, "HPCMOE_RUNS": str(root), "TERM": "xterm", "PATH": "/nowhere"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hpcmoe", "watch", "--interval=1"],
            stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True,
        )  # fmt: skip
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until ``text`` is shown."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} never came:\n{self.seen[-4000:]}"
            if select.select([self.master], [], [], 1)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self.master, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[tuple[RunDir, subprocess.Popen[bytes]]]:
    """A run whose job is a real process of this machine, beside one that is over."""
    job = subprocess.Popen(["sleep", "600"])
    over, run = RunDir(tmp_path / "ended1"), RunDir(tmp_path / "lives1")
    for one in (over, run):
        one.path.mkdir()
        one.control.mkdir()
        freeze(to_config(compose(["cluster=local", "model=tiny"])), one.config)
        Journal(one.journal).append("planned", name="watched", scheduler="local", steps=60)
    Journal(over.journal).append("finished", state="COMPLETED", reason=None)
    job_id = f"local-{job.pid}"
    Journal(run.journal).append("submitted", job_id=job_id, start_ticks=process_start_ticks(job.pid))
    attempt = f"{job_id}.0"
    Journal(run.journal, attempt).append("attempt_started", job_id=job_id, restart=0, nodes=1, gpus=0, hosts=["here"])
    run.metrics.write_text(json.dumps({"step": 41, "loss": 3.25, "attempt": attempt, "t": time.time(), "seconds": 1.0}) + "\n")
    run.rank_log(attempt, 0).parent.mkdir(parents=True)
    run.rank_log(attempt, 0).write_text("step 41/60 said rank 0\n")
    yield run, job
    job.kill()
    job.wait()


def test_keys_select_follow_a_log_ask_before_a_cancellation_and_leave(
    live_run: tuple[RunDir, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    run, job = live_run
    terminal = Terminal(tmp_path)
    try:
        terminal.until("41/60")
        terminal.press("j")
        terminal.until("ended1 watched: no job")
        terminal.press("c")
        terminal.until("COMPLETED already")
        terminal.press("\x1b[A")
        terminal.until("lives1 watched: job local-")
        terminal.press("\r")
        terminal.until("step 41/60 said rank 0")
        terminal.press("q")
        terminal.until("j/k select")
        terminal.press("c")
        terminal.until("for good? y/n")
        terminal.press("n")
        terminal.until("goes on")
        assert job.poll() is None
        terminal.press("cy")
        terminal.until("is CANCELLED")
        assert job.wait(10) != 0
        assert read_journal(run.journal)[-1]["state"] == "CANCELLED"
        terminal.press("q")
        assert terminal.process.wait(30) == 0
        assert termios.tcgetattr(terminal.slave) == terminal.before
    finally:
        terminal.close()
