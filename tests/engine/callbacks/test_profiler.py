"""The profiler traces the steps it was asked for, on the ranks it was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.callbacks import cases
from tests.engine.ranks import run_together, write_text


@pytest.mark.multiprocess
def test_a_window_of_steps_is_traced_and_a_trace_too_large_is_not_kept(tmp_path: Path) -> None:
    run_together(2, tmp_path, cases.a_window_of_steps_is_traced, write_text(tmp_path / "text"), tmp_path)
