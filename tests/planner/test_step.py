"""Step times: collectives, bubbles, wire limits, and the published tables' order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcmoe.planner import published
from hpcmoe.planner.comm import Wires, all_to_all, dedup_factor, in_node, ring, wire_ceiling
from hpcmoe.planner.compute import Speed, gemm, hot_rank
from hpcmoe.planner.constants import FITTED
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.machine import Machine
from hpcmoe.planner.step import Costs
from hpcmoe.planner.workload import Workload

DATA = published.read(Path(__file__).parents[1] / "data" / "published.yaml")
SHAPES = {name: published.shape_of(name, spec) for name, spec in DATA["models"].items()}
LEONARDO = Machine("leonardo", "A100-custom-64", 4, 64 * 2**30, {"bf16": 312.0}, 1.64e12, 300e9, 50e9)
WIRES = Wires(inside=200e9, outside=10e9, gpus_per_node=4)


def test_the_network_keeps_a_1t_top8_model_at_ep64_below_484_tokens_per_s() -> None:
    assert wire_ceiling(moe_layers=60, hidden=7168, top_k=8, ep=64, machine=LEONARDO) == pytest.approx(484, abs=1)


def test_sending_each_node_one_copy_doubles_that_ceiling() -> None:
    half = wire_ceiling(moe_layers=60, hidden=7168, top_k=8, ep=64, machine=LEONARDO, dedup=0.5)
    assert half == pytest.approx(969, abs=1)
    assert dedup_factor(ranks=64, top_k=8, gpus_per_node=4) == pytest.approx(16 * (1 - (15 / 16) ** 8) / 8)


def test_there_is_no_wire_ceiling_inside_a_node() -> None:
    assert wire_ceiling(60, 7168, 8, ep=4, machine=LEONARDO) is None


@pytest.mark.parametrize(("size", "stride", "expected"), [(4, 1, 4), (8, 1, 4), (8, 2, 2), (16, 4, 1), (2, 1, 2), (8, 8, 1)])
def test_ranks_of_a_group_that_share_a_node_of_four(size: int, stride: int, expected: int) -> None:
    assert in_node(size, stride, 4) == expected


def test_a_ring_over_nodes_uses_the_network_share_of_every_gpu_of_the_group() -> None:
    strided, packed = ring(1e9, 16, 4, WIRES), ring(1e9, 16, 1, WIRES)
    assert strided / packed == pytest.approx(4, rel=0.01)


def test_measured_all_to_alls_on_h100_come_out_within_15_percent() -> None:
    h100 = Machine("h100", "H100-SXM5", 8, None, {"bf16": 989.0}, 3.35e12, 450e9, 400e9)
    reached = Wires(450e9 * FITTED.nvlink, 50e9 * FITTED.network, h100.gpus_per_node)
    size = 4096 * 8 * 7168 * 2.0
    assert all_to_all(size, 64, reached) == pytest.approx(9164e-6, rel=0.15)
    assert all_to_all(size, 16, reached) == pytest.approx(5774e-6, rel=0.15)


def test_the_two_levels_of_an_all_to_all_run_at_once() -> None:
    size = 16e6
    assert all_to_all(size, 8, WIRES) == pytest.approx(size * 4 / 8 / WIRES.outside, rel=0.05)


def test_small_matmuls_reach_less_of_the_peak() -> None:
    speed = Speed(matmul=1e14, attention=1e14, memory=1e12, half=100.0)
    large, small = gemm(8192, 8192, 8192, speed), gemm(64, 64, 64, speed)
    assert 2 * 8192**3 / large > 0.95e14
    assert 2 * 64**3 / small < 0.1e14


def test_finer_experts_are_harder_to_balance_unless_balance_is_forced() -> None:
    work = Workload(seq=4096, batch=8)
    coarse, fine = (hot_rank(SHAPES[name], work, FITTED) for name in ("mixtral-8x7B", "qwen3-30B-A3B"))
    assert 1 < coarse < fine
    assert hot_rank(SHAPES["qwen3-30B-A3B"], replace(work, imbalance=False), FITTED) == 1.0


def test_parts_of_a_step_add_up_to_it() -> None:
    step = Costs(SHAPES["mixtral-8x7B"], Workload(seq=4096, batch=1024), LEONARDO).step(Layout(pp=4, dp_shard=8, tp=2, ep=4))
    assert sum(step.parts().values()) == pytest.approx(step.total)


def test_experts_over_two_nodes_are_slower_than_inside_one() -> None:
    shape, work = SHAPES["qwen3-30B-A3B"], Workload(seq=4096, batch=64)
    costs = Costs(shape, work, LEONARDO)
    inside, across = costs.step(Layout(pp=2, dp_shard=4, ep=4)), costs.step(Layout(dp_shard=8, ep=8))
    assert across.total > 1.2 * inside.total  # measured on JUPITER: 3,211 against 5,236 tokens/s/GPU


def test_recompute_costs_time_and_more_of_it_costs_more() -> None:
    costs = Costs(SHAPES["mixtral-8x7B"], Workload(seq=4096, batch=64), LEONARDO)
    times = [costs.step(Layout(dp_shard=64, ep=4, recompute=mode)).total for mode in ("none", "selective", "full")]
    assert times == sorted(times)
    assert times[0] < times[2]


def _predicted(prefix: str, without: str = "-no row-") -> list[tuple[float, float]]:
    pairs = []
    for row in DATA["rows"]:
        case = published.case_of(row, DATA["models"])
        if case is not None and case.measured and row["id"].startswith(prefix) and without not in row["id"]:
            step = Costs(case.shape, case.work, case.machine).step(case.layout)
            pairs.append((case.work.batch * case.work.seq / step.total / case.layout.world, case.measured))
    return pairs


@pytest.mark.parametrize("prefix", ["fold-mixtral-8x22B-", "fold-qwen2"])
def test_the_folding_papers_best_and_worst_layouts_are_predicted_so(prefix: str) -> None:
    rows = _predicted(prefix, without="G8T8")
    assert max(rows)[1] == max(measured for _, measured in rows)
    assert min(rows)[1] == min(measured for _, measured in rows)


def test_published_speeds_are_met_within_a_tenth_in_the_median() -> None:
    errors = sorted(abs(predicted / measured - 1) for predicted, measured in _predicted(""))
    assert len(errors) > 220
    assert errors[len(errors) // 2] < 0.10
