"""Stages are consecutive, complete, and as even as the layers allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.errors import UserError
from hpcmoe.models.accounting import flops_per_token
from hpcmoe.models.partition import SCHEDULES, SLACK, _layer_costs, chunks, schedule_violation, split, stages_of_rank

SMALL = ModelConfig(
    name="small", vocab_size=272, hidden=32, layers=8, heads=4, kv_heads=2, head_dim=8, experts=8, top_k=2, expert_ffn=16, ffn=48
)


def loads(model: ModelConfig, seq_len: int, stages: list[range]) -> list[int]:
    """Forward FLOPs a token of each stage, the head on the last."""
    sums = [sum(_layer_costs(model, layer, seq_len)[0] for layer in stage) for stage in stages]
    sums[-1] += 2 * model.vocab_size * model.hidden
    return sums


def best(costs: list[int], last: int, stages: int) -> int:
    """The least possible load of the most loaded stage, by trying everything."""
    if stages == 1:
        return sum(costs) + last
    return min(max(sum(costs[:cut]), best(costs[cut:], last, stages - 1)) for cut in range(1, len(costs) - stages + 2))


@given(
    layers=st.integers(1, 9), dense=st.integers(0, 9), ffn=st.integers(1, 400), vocab=st.integers(1, 5000),
    stages=st.integers(1, 9),
)  # fmt: skip
def test_stages_hold_every_layer_once_in_order_and_the_busiest_is_as_light_as_can_be(
    layers: int, dense: int, ffn: int, vocab: int, stages: int
) -> None:
    model = replace(SMALL, layers=layers, first_dense_layers=min(dense, layers), ffn=ffn, vocab_size=vocab)
    if stages > layers:
        with pytest.raises(UserError, match="at least as many layers"):
            split(model, 64, stages)
        return
    parts = split(model, 64, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert all(parts)
    costs = [_layer_costs(model, layer, 64)[0] for layer in range(layers)]
    assert max(loads(model, 64, parts)) <= best(costs, 2 * vocab * model.hidden, stages) * SLACK


def test_a_wide_head_takes_layers_away_from_the_last_stage() -> None:
    assert [len(part) for part in split(SMALL, 64, 2)] == [4, 4]
    assert [len(part) for part in split(replace(SMALL, vocab_size=4096), 64, 2)] == [7, 1]


def test_what_does_not_divide_leaves_the_first_stage_lighter_as_it_keeps_most_activations() -> None:
    assert [len(part) for part in split(replace(SMALL, layers=7, vocab_size=1), 64, 2)] == [3, 4]


def test_layer_costs_and_the_head_add_up_to_the_models_forward_flops_with_causal_attention() -> None:
    model = replace(SMALL, first_dense_layers=2)
    forward = sum(loads(model, 64, split(model, 64, 4)))
    square = flops_per_token(model, 64, "titan") - flops_per_token(model, 0, "titan")
    assert 3 * forward == flops_per_token(model, 64, "titan") - square // 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_is_on_one_rank(schedule: str) -> None:
    held = [stage for rank in range(4) for stage in stages_of_rank(schedule, 4, rank)]
    assert sorted(held) == list(range(4 * chunks(schedule)))


def test_v_shaped_schedules_keep_first_and_last_stage_on_one_rank() -> None:
    assert stages_of_rank("ZBVZeroBubble", 4, 0) == [0, 7]
    assert stages_of_rank("DualPipeV", 4, 3) == [3, 4]
    assert stages_of_rank("Interleaved1F1B", 4, 1) == [1, 5]


@pytest.mark.parametrize(
    ("schedule", "microbatches", "words"),
    [
        ("1F1B", 3, "at least 4 microbatches"),
        ("DualPipeV", 7, "at least 8 microbatches"),
        ("Interleaved1F1B", 6, None),
        ("Interleaved1F1B", 9, "a multiple of 4"),
        ("GPipe", 1, None),
        ("ZBVZeroBubble", 5, None),
    ],
)
def test_too_few_or_uneven_microbatches_are_one_line(schedule: str, microbatches: int, words: str | None) -> None:
    said = schedule_violation(schedule, 4, microbatches)
    assert said is None if words is None else words in (said or "")
    assert schedule_violation(schedule, 1, microbatches) is None
