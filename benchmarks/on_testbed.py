"""A testbed for a benchmark: one that is up, or one of its own. Not for what is measured there."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tests.slurm import testbed_cluster
from tests.slurm.testbed_client import Testbed


@contextmanager
def testbed_at(root: Path | None, user: str | None) -> Iterator[Testbed]:
    """The testbed that is up in ``root``; None: one of our own, where ``user`` may submit.

    Ends the program with exit code 2 and one line where there can be none, or where ``user`` cannot run this Python.
    """
    if root is not None:
        yield _usable(Testbed(root), user)
        return
    if (reason := testbed_cluster.why_unusable()) is not None:
        _refuse(reason)
    own = Path(tempfile.mkdtemp(prefix="bench-"))
    own.chmod(0o755)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # its daemons must not outlive this process
    testbed_cluster.up(own, users=(user,) if user else ())
    try:
        yield _usable(Testbed(own), user)
    finally:
        testbed_cluster.down(own)
        print(f"the testbed's logs are in {own / 'log'}")


def _usable(testbed: Testbed, user: str | None) -> Testbed:
    try:
        testbed.run([sys.executable, "-c", "import hpcmoe"], user, check=True)
    except (OSError, KeyError, subprocess.CalledProcessError) as error:
        _refuse(f"{user or 'this user'} cannot run hpcmoe with {sys.executable}: {error}")
    return testbed


def _refuse(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    raise SystemExit(2)
