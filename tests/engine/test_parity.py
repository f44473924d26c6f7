"""Layouts change where work is done and nothing else. Tolerances stand in parity_cases: fp32 sums in another order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcmoe.models.partition import split
from tests.engine import parity_cases
from tests.engine.parity_reference import SETTINGS, reference
from tests.engine.ranks import run_together, write_text

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text")


@pytest.fixture(scope="module")
def references(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of every setting in one process."""
    folder = tmp_path_factory.mktemp("references")
    for name, setting in SETTINGS.items():
        torch.save(reference(text, setting), folder / name)
    return folder


def test_the_settings_are_what_their_names_say(text: Path, references: Path) -> None:
    token = torch.load(references / "one token")
    assert all(int(step["counts"].sum()) == 4 * 2 * 2 for step in token), "4 ranks of a token, 2 layers, top 2"
    assert any((step["counts"] == 0).any() for step in token), "an expert without tokens"
    first = torch.load(references / "ties")[0]["counts"]
    assert ((first > 0).sum(-1) == 2).all(), "all tokens choose the same two of experts that score alike"
    assert split(SETTINGS["full"].model, 16, 2)[0] == range(SETTINGS["full"].model.first_dense_layers), "no experts in stage 0"


@pytest.mark.parametrize("ranks", [4, 8])
def test_every_layout_trains_as_one_process_does(tmp_path: Path, text: Path, references: Path, ranks: int) -> None:
    run_together(
        ranks, tmp_path, parity_cases.each_layout_trains_as_one_process, text, tmp_path, references, ranks, patience_s=600.0
    )


def test_a_checkpoint_of_any_layout_is_read_bitwise_by_any_other(tmp_path: Path, text: Path) -> None:
    run_together(4, tmp_path, parity_cases.each_layout_reads_each_others_checkpoint, text, tmp_path)


def test_kernels_train_alike_and_bf16_is_close(tmp_path: Path, text: Path, references: Path) -> None:
    jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (parity_cases.experts_equal_each_other_in_every_kernel, (text, tmp_path, references)),
        (parity_cases.bf16_computes_in_bf16_over_fp32_masters, (text, tmp_path, references)),
    ]
    run_together(4, tmp_path, parity_cases.run_in_turn, jobs)
