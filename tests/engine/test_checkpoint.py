"""A checkpoint that lacks anything of any stage is not published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hpcmoe.engine.checkpoint import check_whole, whole_tensors
from tests.engine.ranks import small_model

MODEL = small_model()


def written(folder: Path, **left_out: torch.Size | None) -> dcp.FileSystemReader:
    """A checkpoint of all of MODEL's tensors but those whose shape is given: another, or None for not at all."""
    shapes = {name: left_out.get(name.replace(".", "_"), shape) for name, shape in whole_tensors(MODEL).items()}
    dcp.save(
        {name: torch.zeros(shape) for name, shape in shapes.items() if shape is not None}, checkpoint_id=folder, no_dist=True
    )
    return dcp.FileSystemReader(folder)


def test_a_complete_checkpoint_is_whole(tmp_path: Path) -> None:
    check_whole(written(tmp_path), MODEL)


def test_a_checkpoint_without_a_stage_of_the_pipeline_names_what_is_missing(tmp_path: Path) -> None:
    deeper = replace(MODEL, layers=3)
    with pytest.raises(OSError, match=r"model\.layers\.2\.\S+ is missing"):
        check_whole(written(tmp_path), deeper)


def test_a_checkpoint_with_some_ranks_experts_only_is_refused(tmp_path: Path) -> None:
    half = torch.Size([4, 16, 32])
    reader = written(tmp_path, model_layers_1_moe_experts_w1_EFD=half)
    with pytest.raises(OSError, match=r"w1_EFD has the shape \(4, 16, 32\) in the checkpoint and \(8, 16, 32\) in the model"):
        check_whole(reader, MODEL)


def test_moments_and_router_biases_are_counted_too(tmp_path: Path) -> None:
    names = whole_tensors(MODEL)
    assert "model.layers.0.moe.router.balance_E" in names
    with pytest.raises(OSError, match=r"optim\.embed\.weight\.exp_avg_sq is missing"):
        check_whole(written(tmp_path, optim_embed_weight_exp_avg_sq=None), MODEL)
