"""One process at a time: a file that is locked while something is done. Stdlib only; for any room."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_LOOK_S = 0.2
# What a file system says that has no such locks (Lustre without -o flock, some FUSE mounts).
NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold ``path`` locked; yields False when another process does for longer than ``wait_s``. A dead process's lock is free.

    Where the file system has no locks it yields True: what it guards must not rest on the lock alone.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _locked(fd, time.monotonic() + wait_s)
    finally:
        os.close(fd)


def _locked(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        except OSError as error:
            if error.errno in NO_LOCKS:
                return True
            raise
        time.sleep(LOCK_LOOK_S)
