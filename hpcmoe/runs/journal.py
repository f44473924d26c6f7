"""The journal: ``events.jsonl`` in a run directory, the only truth about a run's life.

Append-only; every process that learns something adds one line with one write. Not for metrics (metrics.jsonl) or for prose.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Journal:
    """Appends events for one attempt (or for none: the login node's own events).

    A line is written with a single ``write`` on a descriptor opened with O_APPEND, so that lines of several processes and nodes
    do not mix. If an earlier writer died inside its line, the new line starts on a fresh one.
    """

    def __init__(self, path: Path, attempt: str | None = None) -> None:
        self.path = Path(path)
        self.attempt = attempt

    def append(self, event: str, **fields: Any) -> Event:
        """Write one event now, durably; returns it as written."""
        entry: Event = {"t": time.time(), "event": event, "attempt": self.attempt, **fields}
        line = json.dumps(entry, default=str) + "\n"
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            os.write(fd, (("\n" if torn else "") + line).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        return entry


def iter_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a .jsonl file; torn or foreign lines (a writer was killed) are passed over."""
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        return
    for line in text.split(b"\n"):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def read_journal(path: Path) -> list[Event]:
    """All whole events in the order they were written; an absent journal is an empty one."""
    return [entry for entry in iter_json_lines(path) if "event" in entry and "t" in entry]
