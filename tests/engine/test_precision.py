"""Number formats hold in every kind of parallelism, and moments change theirs only where the journal says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import precision_cases
from tests.engine.ranks import run_together, write_text

pytestmark = pytest.mark.multiprocess


def test_bf16_is_in_the_stream_and_fp32_in_routing_masters_and_gradients(tmp_path: Path) -> None:
    run_together(4, tmp_path, precision_cases.dtypes_are_where_they_belong, write_text(tmp_path / "text"), tmp_path)


def test_bf16_moments_and_reductions_train_and_checkpoints_convert(tmp_path: Path) -> None:
    run_together(
        4, tmp_path, precision_cases.bf16_moments_and_reductions_train_and_convert, write_text(tmp_path / "text"), tmp_path
    )
