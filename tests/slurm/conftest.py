"""The real Slurm testbed as pytest fixtures, for the tests of this folder."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import testbed_cluster
from tests.slurm.testbed_client import TEST_USER, Testbed
from tests.slurm.testbed_processes import Process, start_ticks

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # pytest hands every conftest all items, not only those of its folder
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


def stop_orphans() -> None:
    """Stop the testbeds of sessions that were killed before they could: their process is in the folder's name."""
    for root in Path(tempfile.gettempdir()).glob("testbed-*"):
        owner = re.fullmatch(r"testbed-(\d+)\.(\d+)-\w+", root.name)
        if owner is not None and not Process("pytest", int(owner[1]), int(owner[2])).alive():
            testbed_cluster.down(root)
            shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """A testbed of this session's own."""
    if reason := testbed_cluster.why_unusable():
        if os.environ.get("HPCMOE_REQUIRE_SLURM") == "1" or os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    stop_orphans()
    # Not pytest's own folder: ordinary users may not enter that, and sockets need short paths.
    root = Path(tempfile.mkdtemp(prefix=f"testbed-{os.getpid()}.{start_ticks(os.getpid())}-"))
    root.chmod(0o755)
    try:
        testbed_cluster.up(root)
        yield Testbed(root)
    finally:
        testbed_cluster.down(root)
        shutil.rmtree(root)


@pytest.fixture(scope="session")
def reachable() -> Iterator[None]:
    """Ordinary users reach this interpreter and this checkout: closed folders above them are opened, and closed again."""
    changed: dict[Path, int] = {}
    for place in (Path(sys.executable), Path(sys.executable).resolve(), Path(sys.base_prefix), HERE):
        for folder in place.parents:
            mode = stat.S_IMODE(folder.stat().st_mode)
            if not mode & stat.S_IXOTH:
                changed[folder] = mode
                folder.chmod(mode | stat.S_IXOTH)
    yield
    for folder, mode in changed.items():
        folder.chmod(mode)


@pytest.fixture(scope="session")
def ordinary_user(testbed: Testbed, reachable: None) -> str:
    """A user without rights, whose jobs the testbed accepts."""
    try:
        pwd.getpwnam(TEST_USER)
    except KeyError:
        subprocess.run(["useradd", "--create-home", TEST_USER], check=True)
    testbed_cluster.add_user(testbed.root, TEST_USER)
    return TEST_USER
