"""What a rank says must not end it: its log may lie on the disk that is full. Stdlib only."""

from __future__ import annotations

import contextlib
import io
import sys


class Outlet(io.TextIOWrapper):
    """A text stream that loses words rather than raise OSError."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def speak_through_outlets() -> None:
    """Stdout and stderr of this process, from now on; each write goes to its file at once."""
    sys.stdout, sys.stderr = (
        Outlet(io.FileIO(fd, "wb", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True)
        for fd in (1, 2)
    )
