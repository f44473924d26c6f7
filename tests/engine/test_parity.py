"""Layouts change where work is done and nothing else. Tolerances: fp32 sums in another order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import parity_cases
from tests.engine.ranks import run_together, write_text

pytestmark = pytest.mark.multiprocess


def test_every_layout_trains_as_one_process_does(tmp_path: Path) -> None:
    run_together(4, tmp_path, parity_cases.every_layout_equals_one_process, write_text(tmp_path / "text"), tmp_path)


def test_a_checkpoint_of_any_layout_is_read_bitwise_by_any_other(tmp_path: Path) -> None:
    run_together(4, tmp_path, parity_cases.any_layout_reads_any_others_checkpoint, write_text(tmp_path / "text"), tmp_path)


def test_all_expert_kernels_train_alike(tmp_path: Path) -> None:
    run_together(4, tmp_path, parity_cases.experts_equal_each_other_in_every_kernel, write_text(tmp_path / "text"), tmp_path)


def test_bf16_computes_in_bf16_over_fp32_masters(tmp_path: Path) -> None:
    run_together(4, tmp_path, parity_cases.bf16_computes_in_bf16_over_fp32_masters, write_text(tmp_path / "text"), tmp_path)
