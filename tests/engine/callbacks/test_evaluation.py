"""Evaluation is right, changes nothing, and lets a stop request through."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.callbacks import cases
from tests.engine.ranks import run_together, write_text

pytestmark = pytest.mark.multiprocess


def test_evaluation_is_one_processs_and_leaves_training_as_it_was(tmp_path: Path) -> None:
    run_together(2, tmp_path, cases.evaluation_changes_nothing_and_is_right, write_text(tmp_path / "text"), tmp_path)


def test_a_stop_request_is_heard_within_one_batch_and_the_evaluation_done_again(tmp_path: Path) -> None:
    run_together(2, tmp_path, cases.a_stop_is_heard_within_one_evaluation_batch, write_text(tmp_path / "text"), tmp_path)
