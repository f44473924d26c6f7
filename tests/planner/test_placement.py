"""The two places an ep group can have: its ranks neighbours inside a node, or one on each of several nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.validate import validate
from hpcmoe.engine.support import resolve_sizes
from hpcmoe.planner.comm import wire_ceiling
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.machine import from_cluster
from hpcmoe.planner.plan import make, to_json
from hpcmoe.planner.render import placement, reasons
from hpcmoe.planner.search import Pins, Search
from hpcmoe.planner.shapes import from_config
from hpcmoe.planner.step import Costs
from hpcmoe.planner.workload import Workload

SIZES = ["train.seq_len=4096", "train.global_batch_tokens=4194304", "precision=bf16"]
MIXTRAL = load(["model=mixtral_8x7b", "cluster=leonardo", "nodes=16", *SIZES])
MACHINE = from_cluster(MIXTRAL.cluster, MIXTRAL.gpus_per_node)
SHAPE = from_config(MIXTRAL.model)
INSIDE = Layout(dp_shard=16, ep=4)
ACROSS = replace(INSIDE, ep_placement="across")


def test_neighbours_of_a_group_are_one_or_an_efsdp_group_apart() -> None:
    # 16 ranks, ep 4: inside, ep groups are 0-3, 4-7, ...; across, they are 0 4 8 12, 1 5 9 13, ...
    assert (INSIDE.ep_stride, INSIDE.efsdp_stride) == (1, 4)
    assert (ACROSS.ep_stride, ACROSS.efsdp_stride) == (4, 1)


@pytest.mark.parametrize(
    ("layout", "matters"),
    [
        (Layout(dp_shard=16, ep=4), True),
        (Layout(dp_shard=8, tp=2, ep=8), True),
        (Layout(dp_shard=16, ep=16), False),  # an expert is nowhere sharded
        (Layout(dp_shard=16, ep=1), False),
        (Layout(dp_shard=4, dp_replicate=4, ep=2), False),  # both groups lie in one node
    ],
)
def test_placement_matters_where_it_changes_the_links(layout: Layout, matters: bool) -> None:
    assert layout.placement_matters(gpus_per_node=4) is matters


def test_inside_the_all_to_all_is_faster_and_across_the_gathers_are() -> None:
    costs = Costs(SHAPE, Workload(seq=4096, batch=16), MACHINE)
    inside, across = costs.layer(INSIDE, True), costs.layer(ACROSS, True)
    assert across.a2a > 3 * inside.a2a
    assert costs._data_parallel(ACROSS, 0)[0] < 0.6 * costs._data_parallel(INSIDE, 0)[0]


def test_memory_does_not_depend_on_placement() -> None:
    costs = Costs(SHAPE, Workload(seq=4096, batch=16), MACHINE)
    assert costs.memories.fullest(INSIDE, 1) == costs.memories.fullest(ACROSS, 1)


def test_the_search_costs_both_placements_of_one_size() -> None:
    search = Search(SHAPE, Workload(seq=4096, batch=1024), MACHINE, 16, Pins(pp=1, tp=1, ep=4, microbatch=1))
    found = {c.layout.ep_placement for c in search.run() if c.layout.dp_replicate == 1}
    assert found == {"inside", "across"}


def test_few_tokens_and_many_weights_put_the_experts_across() -> None:
    few = load(["model=mixtral_8x22b", "cluster=leonardo", "nodes=16", "train.seq_len=512", "train.global_batch_tokens=32768"])
    pins = Pins(pp=1, tp=1, ep=8, dp_shard=64)
    assert make(few, pins).layout.ep_placement == "across"


def test_the_other_placement_stands_among_the_alternatives_with_what_it_loses() -> None:
    plan = make(MIXTRAL)
    turned = replace(plan.layout, ep_placement="across")
    assert plan.layout.ep_placement == "inside"
    assert any(c.layout == turned for c in plan.others)
    assert any("placed across instead: -" in line and "more expert all-to-all" in line for line in reasons(plan))
    assert "across" in {entry["layout"]["ep_placement"] for entry in to_json(plan)["alternatives"]}


def test_a_pinned_placement_is_kept() -> None:
    plan = make(MIXTRAL, Pins(ep=4, ep_placement="across", tp=1, dp_replicate=1, pp=4))
    assert plan.layout.ep_placement == "across"
    assert "EP 4 spans 4 nodes" in placement(plan.layout, 4)
    assert "(ep_placement=across)" in placement(plan.layout, 4)


def test_across_the_wire_ceiling_holds_for_an_ep_that_a_node_could_hold() -> None:
    assert wire_ceiling(60, 7168, 8, ep=4, machine=MACHINE) is None
    assert wire_ceiling(60, 7168, 8, ep=4, machine=MACHINE, stride=4) == pytest.approx(484 * (60 / 64) / (3 / 4), rel=0.01)


def test_submit_takes_a_placement_and_freezes_the_default() -> None:
    assert validate(load([])).layout.ep_placement == "inside"
    across = validate(load(["layout.ep=2", "layout.ep_placement=across"]))
    assert resolve_sizes(across).ep_placement == "across"
