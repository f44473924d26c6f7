"""When the loop hears a stop request, and that a growing batch is the same in every layout and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.callbacks import cases
from tests.engine.ranks import run_together, write_text

pytestmark = pytest.mark.multiprocess


def test_a_stop_request_during_the_first_step_is_heard_at_its_end(tmp_path: Path) -> None:
    run_together(2, tmp_path, cases.a_stop_is_heard_in_the_first_step, write_text(tmp_path / "text"), tmp_path)


def test_a_stop_request_while_a_checkpoint_is_written_is_heard_within_a_step(tmp_path: Path) -> None:
    run_together(2, tmp_path, cases.a_stop_is_heard_while_a_checkpoint_is_written, write_text(tmp_path / "text"), tmp_path)


def test_the_batch_grows_alike_in_every_layout_and_after_a_resume(tmp_path: Path) -> None:
    run_together(
        2, tmp_path, cases.the_batch_grows_alike_in_every_layout_and_after_a_resume, write_text(tmp_path / "text"), tmp_path
    )
