"""Plans: the choice, given layouts, refusals, honesty about what is not known."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.planner import provenance
from hpcmoe.planner.check import check, fill_queue, summary
from hpcmoe.planner.layout import RECOMPUTE
from hpcmoe.planner.plan import make, to_json
from hpcmoe.planner.search import Pins
from hpcmoe.resources import resource_dir

CLUSTERS = sorted(path.stem for path in (resource_dir("conf") / "cluster").glob("*.yaml"))


def config(model: str, cluster: str, nodes: int, *overrides: str, batch: int = 1024) -> Config:
    size = ["train.seq_len=4096", f"train.global_batch_tokens={4096 * batch}", "precision=bf16"]
    return load([f"model={model}", f"cluster={cluster}", f"nodes={nodes}", *size, *overrides])


def test_mixtral_on_16_leonardo_nodes_fits_with_experts_inside_the_node() -> None:
    plan = make(config("mixtral_8x7b", "leonardo", 16))
    assert plan.fits
    assert plan.layout.world == 64
    assert plan.layout.ep <= 4
    assert plan.tokens_per_s is not None
    assert 0.2 < (plan.mfu or 0) < 0.6


def test_the_example_layout_on_16_gpus_is_feasible_and_kept_as_given() -> None:
    plan = make(config("moe_32x4096", "jupiter", 4), Pins(tp=2, pp=2, ep=4))
    assert plan.fits
    assert (plan.layout.pp, plan.layout.dp_shard, plan.layout.tp, plan.layout.ep) == (2, 4, 2, 4)
    assert plan.given == ("pp", "tp", "ep")


def test_where_the_example_layout_does_not_fit_the_plan_says_why() -> None:
    plan = make(config("moe_32x4096", "leonardo", 4), Pins(tp=2, pp=2, ep=4))
    assert not plan.fits
    assert "most of it is gradients" in plan.impossible[0]  # whole ones, as PyTorch's pipeline sums them


def test_a_trillion_parameters_fit_on_128_leonardo_nodes_in_the_right_queue() -> None:
    plan = make(config("moe_1t", "leonardo", 128))
    assert plan.fits
    assert plan.queue.qos == "boost_qos_bprod"


def test_what_does_not_fit_is_impossible_with_the_limit_and_the_node_count_that_would_do() -> None:
    plan = make(config("moe_1t", "leonardo", 16))
    assert not plan.fits
    assert plan.tokens_per_s is None
    assert plan.impossible[0].startswith("memory: the leanest layout")
    assert "60.1 GiB are usable" in plan.impossible[0]
    assert plan.impossible[0].endswith("it fits on 128 nodes")
    assert to_json(plan)["mfu"] is None


def test_a_wished_mfu_that_the_network_forbids_is_impossible_with_the_wire_limit() -> None:
    asked = config("deepseek_v3", "leonardo", 256, batch=4096)
    plan = make(asked, Pins(ep=64, tp=1), target_mfu=0.5)
    assert plan.impossible[0].startswith("wire: EP 64 over 12.5 GB/s a GPU cannot pass 501 tokens/s/GPU")
    assert "MFU 50% (titan, of 312 TFLOP/s) needs 555 tokens/s/GPU" in plan.impossible[0]


def test_a_wish_that_is_met_changes_nothing() -> None:
    assert make(config("mixtral_8x7b", "leonardo", 16), target_mfu=0.1).impossible == ()


def test_alternatives_are_fully_costed_and_none_that_fits_is_faster() -> None:
    plan = make(config("qwen3_235b_a22b", "jupiter", 64))
    assert len(plan.others) >= 3
    assert all(not c.fits or (c.tokens_per_s or 0) <= (plan.tokens_per_s or 0) for c in plan.others)


@pytest.mark.parametrize(
    ("model", "overrides", "pins", "words"),
    [
        ("mixtral_8x7b", ["precision=fp8"], Pins(), "A100-custom-64 .* has no FP8 units"),
        ("mixtral_8x7b", [], Pins(tp=8), "layout.tp=8 needs 8 GPUs in one node and leonardo has 4"),
        ("mixtral_8x7b", [], Pins(ep=3), "layout.ep=3 does not divide model.experts=8"),
        ("mixtral_8x7b", [], Pins(pp=64), "layout.pp=64 .* needs more layers than model.layers=32"),
        ("mixtral_8x7b", [], Pins(pp=3), "pp=3 = 3 does not make the 64 GPUs"),
        ("mixtral_8x7b", [], Pins(recompute="some"), "layout.recompute='some' is not one of none, selective, layer, full"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_line(model: str, overrides: list[str], pins: Pins, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(config(model, "leonardo", 16, *overrides), pins)


def test_fp8_is_planned_where_there_are_units_for_it() -> None:
    slow, fast = (make(config("mixtral_8x22b", "jupiter", 32, f"precision={p}")) for p in ("bf16", "fp8"))
    assert (fast.tokens_per_s or 0) > (slow.tokens_per_s or 0)
    assert fast.peak_tflops == 1979


def test_a_machine_without_figures_gets_a_layout_and_no_speed() -> None:
    plan = make(load([]))
    assert plan.fits
    assert plan.tokens_per_s is None
    assert plan.limit is None
    assert any("no time, tokens/s or MFU" in text for text in plan.assumptions)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_figure_of_a_cluster_has_a_source_or_is_called_unverified(cluster: str) -> None:
    facts = load([f"cluster={cluster}"]).cluster
    silent = [path for path in provenance.figures(facts) if provenance.source_of(facts, path) is None]
    assert not silent or cluster == "testbed"  # which we build ourselves


def test_unverified_figures_are_named_in_the_plan() -> None:
    plan = make(config("mixtral_8x7b", "marenostrum5", 16))
    assert any("gpu.mem_gib" in text and "without a read source" in text for text in plan.assumptions)


@pytest.mark.parametrize("cluster", [c for c in CLUSTERS if c not in ("local", "testbed")])
def test_every_cluster_can_be_planned_for(cluster: str) -> None:
    plan = make(config("olmoe_1b_7b", cluster, 4))
    assert plan.fits
    assert plan.tokens_per_s is not None


def test_replicas_multiply_to_the_pinned_shards() -> None:
    plan = make(config("olmoe_1b_7b", "leonardo", 4), Pins(tp=1, pp=1, dp_shard=4))
    assert (plan.layout.dp_shard, plan.layout.dp_replicate) == (4, 4)


def test_a_thousand_nodes_take_at_most_four_times_as_long_as_128() -> None:
    def fastest(nodes: int, batch: int) -> float:
        asked = config("moe_1t", "lumi_g", nodes, batch=batch)
        times = []
        for _ in range(3):
            begun = time.process_time()
            make(asked)
            times.append(time.process_time() - begun)
        return min(times)

    small, large = fastest(128, 1024), fastest(1024, 8192)
    assert small < 0.5  # seconds; 0.1 on a quiet machine
    assert large < 4 * small + 0.05


def submitted(*overrides: str) -> Config:
    asked = config("olmoe_1b_7b", "leonardo", 4, "slurm.account=me", *overrides, batch=64)
    return validate(asked)


def test_submit_is_told_the_expected_memory_and_speed() -> None:
    plan = check(submitted("layout.microbatch=1"))
    assert plan.fits
    assert "tokens/s/GPU, MFU" in summary(plan)


def test_submit_is_refused_what_cannot_fit() -> None:
    asked = config("mixtral_8x7b", "leonardo", 1, "slurm.account=me", batch=64)
    with pytest.raises(UserError, match=r"impossible: memory: the given layout .* GiB on a GPU and 60.1 GiB are usable"):
        check(validate(asked))


def test_submit_gets_a_qos_only_where_slurms_default_would_not_do() -> None:
    small, large = submitted(), submitted()
    large = replace(large, nodes=128)
    large.layout.dp_shard = 512
    large.train.global_batch_tokens = 512 * 4096
    large.layout.microbatch = 1
    for asked in (small, large):
        fill_queue(asked, check(asked).queue)
    assert small.slurm.qos is None
    assert large.slurm.qos == "boost_qos_bprod"


def test_a_local_run_passes_the_check() -> None:
    assert check(validate(load([]))).fits


def test_schedules_that_split_the_backward_pass_are_among_the_choices_and_said_to_be_unchecked() -> None:
    shape_and_batch = config("mixtral_8x7b", "jupiter", 16, batch=128)
    plan = make(shape_and_batch, Pins(pp=8, tp=1, ep=4))
    assert plan.layout.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")  # few microbatches: waiting decides
    assert plan.layout.recompute == "none"
    assert any("no published run checks them" in text for text in plan.assumptions)


def test_the_cheapest_recompute_that_fits_is_taken() -> None:
    plan = make(config("mixtral_8x7b", "leonardo", 8), Pins(pp=1, tp=1, ep=4, microbatch=1))
    others = {
        m: make(config("mixtral_8x7b", "leonardo", 8), Pins(pp=1, tp=1, ep=4, microbatch=1, recompute=m)) for m in RECOMPUTE
    }
    assert plan.tokens_per_s == max(other.tokens_per_s or 0.0 for other in others.values() if other.fits)
    assert others["none"].best.memory.total > others["layer"].best.memory.total > others["full"].best.memory.total
    assert others["none"].best.memory.total > others["selective"].best.memory.total > others["full"].best.memory.total


def test_a_checkpoint_holds_values_and_moments_in_the_dtypes_they_are_kept_in() -> None:
    whole = make(config("mixtral_8x7b", "leonardo", 16))
    assert whole.checkpoint_bytes == 12 * whole.params.total
    halved = make(config("mixtral_8x7b", "leonardo", 16, "precision.moments=bf16"))
    assert halved.checkpoint_bytes == 8 * halved.params.total
