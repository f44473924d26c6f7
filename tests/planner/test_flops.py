"""FLOPs per token in each convention."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcmoe.planner import published
from hpcmoe.planner.flops import megatron_2021_flops, megatron_flops, titan_2024_flops, titan_flops
from hpcmoe.planner.shapes import Shape

DATA = published.read(Path(__file__).parents[1] / "data" / "published.yaml")
SHAPES = {name: published.shape_of(name, spec) for name, spec in DATA["models"].items()}


def test_one_run_is_counted_23_percent_apart_by_two_conventions() -> None:
    shape = SHAPES["qwen3-30B-A3B-neox"]
    assert titan_flops(shape, 4096) / 1e9 == pytest.approx(26.665, abs=0.001)
    assert megatron_flops(shape, 4096) / 1e9 == pytest.approx(21.757, abs=0.001)


def test_every_published_row_has_the_recomputed_flops() -> None:
    checked = 0
    for row in DATA["rows"]:
        recomputed = row.get("recomputed", {})
        if "gflop_per_token_titan" not in recomputed or "layers_override" in row:
            continue
        shape = SHAPES[row["model"]]
        assert titan_flops(shape, row["seq"]) / 1e9 == pytest.approx(recomputed["gflop_per_token_titan"], rel=5e-4), row["id"]
        assert megatron_flops(shape, row["seq"]) / 1e9 == pytest.approx(recomputed["gflop_per_token_megatron"], rel=5e-4), row[
            "id"
        ]
        checked += 1
    assert checked > 240


def test_the_2021_megatron_formula_gives_the_gpt3_iteration_time() -> None:
    tokens_per_s = 138e12 / megatron_2021_flops(SHAPES["kort-175B"], 2048)
    assert 1536 * 2048 / 1024 / tokens_per_s == pytest.approx(32, rel=0.02)  # seconds an iteration, as printed


def test_the_torchtitan_paper_counts_the_embedding() -> None:
    mfu = 2904 * titan_2024_flops(SHAPES["llama3-8B"], 8192) / 312e12
    assert mfu == pytest.approx(0.568, abs=0.001)


def test_a_sliding_window_attends_to_fewer_tokens() -> None:
    full = Shape("f", vocab=10, hidden=8, layers=2, heads=1, kv_heads=1, head_dim=8)
    windowed = Shape("w", vocab=10, hidden=8, layers=2, heads=1, kv_heads=1, head_dim=8, window=64, window_every=2)
    assert full.attended(4096, causal=True) == 2048
    assert windowed.attended(4096, causal=True) == (64 + 2048) / 2
