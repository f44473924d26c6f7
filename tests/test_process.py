"""Short processes: what they do at exit, and what those inside a job's grace time do without."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "hydra", "omegaconf", "rich", "numpy", "jinja2", "submitit")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_python_searches_for_no_garbage_when_a_short_process_ends_and_exit_handlers_still_run() -> None:
    code = (
        "import atexit, gc\nfrom hpcmoe.process import collect_little\n"
        "atexit.register(lambda: print('frozen' if gc.get_freeze_count() else 'searched'))\ncollect_little()\n"
    )
    assert python(code) == "frozen\n"


@pytest.mark.parametrize("module", ["hpcmoe.runs.arrive", "hpcmoe.runs.depart"])
def test_what_runs_inside_a_grace_time_imports_nothing_heavy(module: str) -> None:
    assert python(f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))") == "\n"
