"""The planner proposes nothing that the engine refuses, and its rules are the engine's."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.engine.support import check_engine
from hpcmoe.errors import UserError
from hpcmoe.models.partition import SCHEDULES, schedule_violation
from hpcmoe.planner.layout import PLACEMENTS, RECOMPUTE, Layout, stage_chunks, violations
from hpcmoe.planner.machine import Machine
from hpcmoe.planner.shapes import from_config
from tests.planner.proposals import NAMES, config_for, proposals

TINY = load([])


def refusal(config: Config, layout: Layout) -> str | None:
    """What the engine says to a layout."""
    asked = copy.deepcopy(config)
    asked.nodes, asked.gpus_per_node = 1, layout.world
    for name in NAMES:
        setattr(asked.layout, name, getattr(layout, name))
    try:
        check_engine(asked)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "model", [[], ["model.tied_embeddings=true"], ["model.layers=6", "model.first_dense_layers=1", "model.ffn=96"]]
)
def test_every_layout_proposed_for_the_testbed_is_taken_by_the_engine(nodes: int, model: list[str]) -> None:
    config = config_for(nodes, *model)
    layouts = list(proposals(config))
    assert len(layouts) > 20
    refused = {layout: refusal(config, layout) for layout in layouts}
    assert not {layout: words for layout, words in refused.items() if words}


def test_sixteen_ranks_are_proposed_in_every_dimension_and_schedule_and_mode() -> None:
    layouts = list(proposals(config_for(4)))
    for name, wanted in (
        ("tp", {1, 2}),
        ("pp", {1, 2, 4}),
        ("ep", {1, 2, 4, 8}),
        ("recompute", set(RECOMPUTE)),
        ("ep_placement", set(PLACEMENTS)),
    ):
        assert {getattr(layout, name) for layout in layouts} >= wanted, name
    assert {layout.schedule for layout in layouts} >= {
        "1F1B",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    }


sizes = st.sampled_from([1, 2, 3, 4])


@given(
    pp=sizes, dp_shard=sizes, tp=sizes, ep=st.sampled_from([1, 2, 3, 4, 8]), schedule=st.sampled_from(SCHEDULES),
    microbatch=st.sampled_from([1, 2, 4]), recompute=st.sampled_from(RECOMPUTE), batch=st.integers(1, 12),
    heads=st.sampled_from([4, 6]),
)  # fmt: skip
def test_planner_and_engine_forbid_the_same_layouts(
    pp: int, dp_shard: int, tp: int, ep: int, schedule: str, microbatch: int, recompute: str, batch: int, heads: int
) -> None:
    config = copy.deepcopy(TINY)
    config.model.heads, config.model.kv_heads = heads, heads // 2
    config.train.seq_len, sequences = 24, batch * dp_shard * microbatch
    config.train.global_batch_tokens = 24 * sequences
    layout = Layout(
        pp=pp, dp_shard=dp_shard, tp=tp, ep=ep, schedule=schedule, microbatch=microbatch, recompute=recompute,
        vstages=stage_chunks(schedule, pp),
    )  # fmt: skip
    machine = Machine("any", "cpu", 12, None, {}, None, None, None, cpu=True)
    problems = violations(from_config(config.model), layout, machine, 24)
    problems += [said for said in [schedule_violation(schedule, pp, batch)] if said]
    assert bool(problems) == (refusal(config, layout) is not None), (problems, refusal(config, layout))
