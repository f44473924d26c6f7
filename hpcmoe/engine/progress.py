"""What can be seen of a command's progress from outside: steps in rank 0's log, and new checkpoints. Stdlib only.

Steps go to metrics.jsonl, one line for each that the log tells; that the attempt got on (``progressed``) goes to the journal,
from which budgets count. With a pattern for checkpoints only these count: a step that was not saved is lost.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from hpcmoe.config.schema import EngineConfig
from hpcmoe.runs.journal import PatientJournal, iter_json_lines
from hpcmoe.runs.rundir import RunDir

CHECKPOINTS_EVERY_S = 5.0
TELL_EVERY_S = 60.0  # a checkpoint in the journal, however often there is a newer one
MOST_AT_ONCE = 1 << 20  # bytes of the log
LONGEST_LINE = 1 << 16  # bytes; more without an end of line is no line of ours
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class LogProgress:
    """Looks from rank 0, every now and then."""

    def __init__(self, run: RunDir, attempt: str, engine: EngineConfig) -> None:
        self.run, self.attempt = run, attempt
        self.log = run.rank_log(attempt, 0)
        self.pattern = None if engine.progress is None else re.compile(engine.progress)
        self.glob, self.folder = engine.checkpoint_glob, Path(engine.chdir or ".")
        self.journal = PatientJournal(run.journal, attempt)
        watched = self.pattern is not None or self.glob is not None
        self.journal.append("command_started", watched=watched)
        self.reached = 0 if self.pattern is None else _highest(run.metrics)  # of earlier attempts, then of this one, too
        self.step: int | None = None
        self._at, self._begun = 0, b""
        self._newest = self._newest_checkpoint()
        self._looked = self._told = 0.0

    def look(self, last: bool = False) -> None:
        """``last``: the command has gone; nothing more will come."""
        if self.pattern is not None:
            while self._read(last):
                pass
        now = time.monotonic()
        if self.glob is not None and (last or now - self._looked >= CHECKPOINTS_EVERY_S):
            self._looked = now
            found = self._newest_checkpoint()
            if found is not None and (self._newest is None or found > self._newest) and (last or now - self._told > TELL_EVERY_S):
                self._newest, self._told = found, now
                self.journal.append("progressed", step=self.step, checkpoint=found[1], written=found[0])

    def _read(self, last: bool) -> bool:
        """One piece of the log; False when it was the last one for now."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._at)
                piece = file.read(MOST_AT_ONCE)
        except OSError:
            return False
        self._at += len(piece)
        lines = re.split(rb"[\r\n]", self._begun + piece)
        self._begun = b"" if last and not piece else lines.pop()[-LONGEST_LINE:]
        self._take([line.decode("utf-8", errors="replace") for line in lines])
        return len(piece) == MOST_AT_ONCE or (last and bool(piece))

    def _take(self, lines: list[str]) -> None:
        found: list[dict[str, Any]] = []
        for line in lines:
            figures = self._figures(_COLOURS.sub("", line))
            if figures is not None:
                found.append({"t": time.time(), "attempt": self.attempt, **figures})
        if not found:
            return
        _append(self.run.metrics, found)
        if self.step is None:
            self.journal.append("first_step", step=found[0]["step"])
        self.step = found[-1]["step"]
        highest = max(line["step"] for line in found)
        if self.glob is None and highest > self.reached and not self._told:
            self._told = time.monotonic()
            self.journal.append("progressed", step=highest, checkpoint=None)
        self.reached = max(self.reached, highest)

    def _figures(self, line: str) -> dict[str, Any] | None:
        assert self.pattern is not None
        match = self.pattern.search(line)
        numbers = {name: _number(text) for name, text in match.groupdict().items()} if match else {}
        step = numbers.pop("step", None)
        if step is None or step < 0:
            return None
        return {"step": int(step), **{name: number for name, number in numbers.items() if number is not None}}

    def _newest_checkpoint(self) -> tuple[float, str] | None:
        """When it was last written (epoch s), and its path as the pattern finds it."""
        if self.glob is None:
            return None
        newest: tuple[float, str] | None = None
        for name in glob.glob(os.path.expanduser(self.glob), root_dir=self.folder, recursive=True, include_hidden=True):
            try:
                written = (self.folder / name).stat().st_mtime
            except OSError:
                continue  # deleted meanwhile
            newest = max(newest or (0.0, ""), (written, name))
        return newest


def _number(text: str | None) -> float | None:
    """1,234.5 and 1234.5; None: no number."""
    try:
        number = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _highest(metrics: Path) -> int:
    return max((line["step"] for line in iter_json_lines(metrics) if isinstance(line.get("step"), int)), default=0)


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    """With one write, as others may read meanwhile. What a full disk does not take is not told."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, "".join(json.dumps(line) + "\n" for line in lines).encode())
        finally:
            os.close(fd)
    except OSError as error:
        print(f"hpcmoe: steps are not written to {path}: {error.strerror}", file=sys.stderr, flush=True)
