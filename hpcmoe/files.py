"""Small files written so that a crash or a reader never meets a part of one. Stdlib only; for any room."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SYNC_THREADS = 32


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` so that a reader or a crash sees the old file or the new one, never a part."""
    import tempfile  # here, since most commands write no file

    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(tmp, 0o644)
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


def sync_all(paths: Iterable[Path]) -> None:
    """Make many files durable. Side by side: a file system that is asked for many at once writes them in a few turns."""
    from concurrent.futures import ThreadPoolExecutor  # here, since few commands write many files

    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        for _ in pool.map(sync, paths):
            pass


def sync(path: Path) -> None:
    """Make a file's content durable, or a directory's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tail_lines(path: Path, most: int, tail_bytes: int = 16384, length: int = 300) -> list[str]:
    """The last lines that are not blank, however long the file is, each of at most ``length`` characters."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    whole = [line.rstrip()[:length] for line in text.splitlines() if line.strip()]
    return whole[-most:]


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")


def read_json(path: Path) -> Any | None:
    """The JSON value in ``path``, or None where there is none (absent or not JSON)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
