"""How a short process of ours treats Python's garbage collector. Not for ranks."""

from __future__ import annotations

import atexit
import gc


def collect_little() -> None:
    """For a command that makes many objects, drops few of them and ends.

    At Python's threshold, collecting is a tenth of such a command's time; and when Python ends it searches all objects once more
    for cycles, which is a fifth. Exit handlers run as ever; memory goes back with the process.
    """
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
