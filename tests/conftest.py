"""For all tests: which of them share a worker, and which go first.

Property tests are not timed, as two cores are shared with Slurm daemons and gloo ranks. They try the same cases each time, so
that a run tells of a change and not of luck; --hypothesis-profile=explore looks for others.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("hpcmoe", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("hpcmoe")

LONGEST_FIRST = (
    "tests/slurm",
    "tests/engine/test_parity.py",
    "tests/engine/",
    "tests/test_local_run.py",
    "tests/test_packaging.py",
)


def group_of(test: str) -> str:
    """The tests of a file share fixtures; those of tests/slurm also a testbed, a user, and the modes of the folders above us."""
    file = test.partition("::")[0]
    return "tests/slurm" if file.startswith("tests/slurm/") else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        group = group_of(item.nodeid)
        return next((turn for turn, start in enumerate(LONGEST_FIRST) if group.startswith(start)), len(LONGEST_FIRST))

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Hands out groups, in our order. xdist's own way to name groups (marks) goes by a name that pytest 9.2 no longer has."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)
