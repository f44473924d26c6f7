"""The journal: ``events.jsonl`` in a run directory, the only truth about a run's life.

Append-only; every process that learns something adds one line with one write. Not for metrics (metrics.jsonl) or for prose.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

TAIL_BYTES = 2048
MOST_LINE_BYTES = 1 << 20  # a line is a few hundred bytes; a longer one is nothing of ours


class Journal:
    """Appends events for one attempt (or for none: the login node's own events).

    A line is written with a single ``write`` on a descriptor opened with O_APPEND, so that lines of several processes and nodes
    do not mix. If an earlier writer died inside its line, the new line starts on a fresh one.
    """

    def __init__(self, path: Path, attempt: str | None = None) -> None:
        self.path = Path(path)
        self.attempt = attempt

    def append(self, event: str, **fields: Any) -> Event:
        """Write one event now, durably; returns it as written. Raises OSError when it could not be written whole."""
        entry: Event = {"t": time.time(), "event": event, "attempt": self.attempt, **fields}
        self._write(json.dumps(entry, default=str) + "\n")
        return entry

    def append_unsynced(self, event: str, **fields: Any) -> Event:
        """The same, for one of many journals that the caller makes durable together (hpcmoe.files.sync_all)."""
        entry: Event = {"t": time.time(), "event": event, "attempt": self.attempt, **fields}
        Journal._write(self, json.dumps(entry, default=str) + "\n", sync=False)
        return entry

    def _write(self, line: str, sync: bool = True) -> None:
        append_lines(self.path, line, sync)


def append_lines(path: Path, lines: str, sync: bool = True) -> None:
    """Add whole lines with one write; what a killed writer or a full disk has torn before does not take them with it.

    Raises OSError, also when only a part of them could be written.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        whole = (("\n" if torn else "") + lines).encode()
        if os.write(fd, whole) < len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


class PatientJournal(Journal):
    """For those who have better things to do than die of a full disk: what cannot be written is kept and comes first next time.

    Events keep their times and their order.
    """

    def __init__(self, path: Path, attempt: str | None = None) -> None:
        super().__init__(path, attempt)
        self._kept: list[str] = []
        self._lock = threading.Lock()  # a checkpoint's thread appends, too

    def _write(self, line: str, sync: bool = True) -> None:
        with self._lock:
            self._kept.append(line)
            self._write_kept()

    def flush(self) -> None:
        """Once more what could not be written, for a process that may append no further event."""
        with self._lock:
            self._write_kept()

    def _write_kept(self) -> None:
        while self._kept:
            try:
                super()._write(self._kept[0])
            except OSError as error:
                print(f"the journal cannot be written ({error}); {len(self._kept)} events wait", file=sys.stderr, flush=True)
                return
            self._kept.pop(0)


def parse_json_lines(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The JSON objects among ``lines``; torn or foreign ones (a writer was killed) are passed over.

    All are read as one JSON array, which takes a third of the time of reading each; where that fails, or does not give a value a
    line, one after the other.
    """
    lines = [line for line in lines if line and not line.isspace()]
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = []
    if len(values) != len(lines):
        values = [value for line in lines if (value := _json(line)) is not None]
    return [value for value in values if isinstance(value, dict)]


def _json(line: bytes) -> Any | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def split_lines(data: bytes) -> list[bytes]:
    """The lines of a .jsonl file. A last line that is still being written, or was left unfinished, is not among them."""
    lines = data.split(b"\n")
    if lines[-1] and _json(lines[-1]) is None:
        lines.pop()
    return lines


def iter_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a .jsonl file; torn or foreign lines (a writer was killed) are passed over."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return
    yield from parse_json_lines(split_lines(data))


def first_json_line(path: Path) -> dict[str, Any] | None:
    """The first line of a .jsonl file, if it is a JSON object of no unheard-of length."""
    try:
        with path.open("rb") as file:
            found = parse_json_lines([file.readline(MOST_LINE_BYTES)])
    except FileNotFoundError:
        return None
    return found[0] if found else None


def last_json_line(path: Path) -> dict[str, Any] | None:
    """The newest whole JSON object of a .jsonl file, read from its end; None where there is none."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        size, length = os.fstat(file).st_size, TAIL_BYTES
        while True:
            data = os.pread(file, length, max(0, size - length))
            whole = length >= size
            lines = data.split(b"\n") if whole else data.split(b"\n")[1:]  # the first one begins before this tail
            for line in reversed(lines):
                found = parse_json_lines([line])
                if found:
                    return found[0]
            if whole or length >= MOST_LINE_BYTES:
                return None
            length *= 4
    finally:
        os.close(file)


def read_journal(path: Path) -> list[Event]:
    """All whole events in the order they were written; an absent journal is an empty one."""
    return events_among(iter_json_lines(path))


def events_among(entries: Iterable[dict[str, Any]]) -> list[Event]:
    return [entry for entry in entries if "event" in entry and "t" in entry]
