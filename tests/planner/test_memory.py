"""Bytes on a GPU against Korthikanti et al. 2022 and the arithmetic of FSDP2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcmoe.planner import published
from hpcmoe.planner.activations import gpt_layer, layer_activations
from hpcmoe.planner.backward import in_block
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.memory import Held, Memories, fullest, state, unsharded
from hpcmoe.planner.params import layer_params, model_params
from hpcmoe.planner.pipeline import in_flight
from hpcmoe.planner.shapes import Shape
from hpcmoe.planner.workload import Workload

DATA = published.read(Path(__file__).parents[1] / "data" / "published.yaml")
SHAPES = {name: published.shape_of(name, spec) for name, spec in DATA["models"].items()}
FIGURE_1 = DATA["memory_anchors"]["korthikanti_fig1_gib_per_gpu"]
FIGURE_7 = DATA["memory_anchors"]["korthikanti_fig7_act_pct"]
# Korthikanti et al. 2022, table 3: tensor and pipeline sizes, interleaving, microbatch
RUNS = {"22B": (8, 1, 1, 4), "175B": (8, 8, 3, 1), "530B": (8, 35, 3, 1), "1T": (8, 64, 1, 1)}
GIB = 2**30


def on_rank(shape: Shape, layout: Layout, rank: int) -> Held:
    return Memories(shape, Workload(seq=4096, batch=64)).held_on(layout, rank)


UNFUSED = Workload(seq=2048, batch=64, flash=False, own=False)


@pytest.mark.parametrize("name", list(RUNS))
def test_weights_and_optimizer_without_sharding_are_18_bytes_a_parameter(name: str) -> None:
    tp, pp, _, _ = RUNS[name]
    shape = replace(SHAPES[f"kort-{name}"], linear_bias=False)  # the figure counts matrices only
    layer = layer_params(shape, moe=False)
    values = Held(dense=(layer.tp / tp) * shape.layers / pp, expert=0.0, block=0.0, ends=0.0, head=0.0)
    total = sum(state(values, Layout(tp=tp, pp=pp, zero="zero1"), UNFUSED))
    assert total / GIB == pytest.approx(FIGURE_1[name]["param_opt"], rel=1e-9)


@pytest.mark.parametrize("name", list(RUNS))
def test_activations_match_figure_1(name: str) -> None:
    tp, pp, chunks, microbatch = RUNS[name]
    shape = SHAPES[f"kort-{name}"]
    schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
    layout = Layout(tp=tp, pp=pp, vstages=chunks, schedule=schedule, microbatch=microbatch)
    flight = in_flight(layout, 16 * pp, 0)
    for mode, key, sequence_parallel in (("none", "act_none", False), ("selective", "act_seqsel", True)):
        work = replace(UNFUSED, sequence_parallel=sequence_parallel)
        kept = layer_activations(shape, work, layout, False, mode).kept
        total = kept * shape.layers / pp * flight
        assert total / GIB == pytest.approx(FIGURE_1[name][key], rel=0.002), key


@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.parametrize(
    ("key", "mode", "sequence_parallel"),
    [("seq", "none", True), ("sel", "selective", False), ("seqsel", "selective", True), ("full", "full", False)],
)
def test_savings_match_figure_7(name: str, key: str, mode: str, sequence_parallel: bool) -> None:
    shape = SHAPES[f"kort-{name}"]
    base = gpt_layer(shape, replace(UNFUSED, sequence_parallel=False), 8, "none")
    saved = gpt_layer(shape, replace(UNFUSED, sequence_parallel=sequence_parallel), 8, mode)
    assert 100 * saved / base == pytest.approx(FIGURE_7[name][key], rel=0.015)


def test_flash_attention_removes_the_score_matrix() -> None:
    shape, work = SHAPES["kort-22B"], replace(UNFUSED, sequence_parallel=True)
    with_scores, flash = gpt_layer(shape, work, 8, "none"), gpt_layer(shape, replace(work, flash=True), 8, "none")
    assert with_scores - flash == 5 * shape.heads * 2048 / 8
    assert flash == 34 * shape.hidden / 8


def test_fsdp_state_is_16_bytes_a_parameter_over_the_whole_world() -> None:
    shape = SHAPES["qwen3-30B-A3B"]
    layout = Layout(dp_shard=64, ep=8)
    total = sum(state(on_rank(shape, layout, 0), layout, Workload(seq=4096, batch=64)))
    assert total == pytest.approx(16 * model_params(shape).total / 64, rel=1e-9)


def test_bf16_moments_make_it_12_bytes() -> None:
    shape, layout = SHAPES["mixtral-8x7B"], Layout(dp_shard=16, ep=4)
    total = sum(state(on_rank(shape, layout, 0), layout, Workload(seq=4096, batch=16, optim_bytes=4.0)))
    assert total == pytest.approx(12 * model_params(shape).total / 16, rel=1e-9)


def test_replicas_do_not_share_state() -> None:
    shape, work = SHAPES["mixtral-8x7B"], Workload(seq=4096, batch=16)
    sharded, replicated = Layout(dp_shard=16, ep=4), Layout(dp_shard=8, dp_replicate=2, ep=4)
    one, two = (sum(state(on_rank(shape, layout, 0), layout, work)) for layout in (sharded, replicated))
    assert two == pytest.approx(2 * one)


def test_the_jupiter_runs_state_is_what_their_peak_shows() -> None:
    shape = SHAPES["qwen3-30B-A3B-neox"]
    layout = Layout(pp=2, dp_shard=4, ep=4)
    params, _, moments = state(on_rank(shape, layout, 0), layout, Workload(seq=4096, batch=16))
    assert (2 * params + moments) / GIB == pytest.approx(56.1, abs=0.2)  # 56.1 to 56.8 GiB measured with full recompute


def test_parameters_of_all_pipeline_ranks_add_up() -> None:
    shape = SHAPES["deepseek-v3"]
    layout = Layout(pp=8, dp_shard=8, ep=8)
    parts = [on_rank(shape, layout, rank) for rank in range(layout.pp)]
    whole = sum(part.dense for part in parts) + layout.ep * sum(part.expert for part in parts)
    assert whole == model_params(shape).total


def test_prefetch_holds_two_blocks_and_the_ends_and_the_heads_gradients_wait() -> None:
    values = Held(dense=100.0, expert=1000.0, block=40.0, ends=7.0, head=3.0)
    assert unsharded(values, Layout(dp_shard=4), Workload(seq=1, batch=1)) == 2 * (2 * 40 + 7 + 3)


def test_a_published_row_has_one_blocks_gradients_beside_and_one_block_reduced_in_fp32() -> None:
    values = Held(dense=100.0, expert=1000.0, block=40.0, ends=7.0, head=3.0)
    work = Workload(seq=1, batch=1, own=False)
    assert unsharded(values, Layout(dp_shard=4), work) == 2 * (2 * 40 + 7) + 2 * (40 + 3) + 4 * 40


def test_a_pipeline_keeps_weights_gathered_and_adds_up_whole_gradients() -> None:
    values = Held(dense=100.0, expert=1000.0, block=40.0, ends=7.0, head=3.0)
    layout, work = Layout(pp=2, dp_shard=4, ep=2), Workload(seq=1, batch=8)
    assert unsharded(values, layout, work) == 2 * 1100
    assert state(values, layout, work) == (4 * (25 + 500), 4 * 1100, 8 * (25 + 500))


SMALL = Shape("s", vocab=100, hidden=64, layers=2, heads=4, kv_heads=4, head_dim=16, experts=8, top_k=2, expert_ffn=64)
LARGE = replace(SMALL, expert_ffn=4096)


def test_large_experts_need_most_when_their_gradients_are_copied_to_be_reduced() -> None:
    work, layout = Workload(seq=16, batch=8, imbalance=False), Layout(dp_shard=8, ep=4)
    experts = 3 * 64 * 4096 * 8 / 4
    assert in_block(LARGE, work, layout, True, "none", 0.0, 0.0) == pytest.approx(4 * experts, rel=0.01)  # fp32
    assert in_block(LARGE, replace(work, reduce_bytes=2.0), layout, True, "none", 0.0, 0.0) == pytest.approx(
        2 * experts, rel=0.01
    )


def test_many_tokens_need_most_inside_the_experts() -> None:
    work, layout = Workload(seq=1 << 20, batch=8, imbalance=False), Layout(dp_shard=8, ep=4)
    gradients = 2 * (1 << 20) * (2 * (2 * 64 - 64) + 64)  # two copies a token: three inside less two gone; the block's own
    moving = 2 * (1 << 20) * (2 * 2 * 64 + 64)  # or, with narrow experts, what the all-to-all sends and receives
    kept = 1e12  # of which much is gone by the time that gradients are reduced
    assert in_block(SMALL, work, layout, True, "none", kept, kept) == pytest.approx(max(gradients, moving), rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "stage", "expected"), [("GPipe", 0, 16), ("1F1B", 0, 4), ("1F1B", 3, 1), ("Interleaved1F1B", 0, 5.5)]
)
def test_activations_in_flight_by_schedule(schedule: str, stage: int, expected: float) -> None:
    layout = Layout(pp=4, schedule=schedule, vstages=2 if schedule == "Interleaved1F1B" else 1)
    assert in_flight(layout, 16, stage) == expected


def test_more_recompute_never_takes_more_memory() -> None:
    for name in ("mixtral-8x7B", "deepseek-v3", "llama3-8B"):
        layout, work = Layout(dp_shard=64, ep=8 if SHAPES[name].experts else 1), Workload(seq=4096, batch=64)
        totals = [fullest(SHAPES[name], replace(layout, recompute=mode), work, 1).total for mode in ("none", "selective", "full")]
        assert totals == sorted(totals, reverse=True), name


def test_padded_experts_cost_memory() -> None:
    shape = Shape("s", vocab=100, hidden=64, layers=2, heads=4, kv_heads=4, head_dim=16, experts=8, top_k=2, expert_ffn=64)
    work = Workload(seq=128, batch=8, padded=True)
    layout = Layout(dp_shard=8, ep=4)
    assert fullest(shape, layout, work, 1).activations > fullest(shape, layout, replace(work, padded=False), 1).activations
