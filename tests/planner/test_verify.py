"""The planner's bytes and counts against the engine's own model, built with fake tensors in a fake process group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.models import accounting
from hpcmoe.planner.flops import megatron_flops, titan_flops
from hpcmoe.planner.params import model_params
from hpcmoe.planner.plan import make
from hpcmoe.planner.search import Pins
from hpcmoe.planner.shapes import from_config
from hpcmoe.planner.verify import Kind, Verification, report, verify
from hpcmoe.resources import resource_dir

MODELS = sorted(path.stem for path in (resource_dir("conf") / "model").glob("*.yaml"))
ON_GPUS = ["cluster=leonardo", "precision=bf16", "train.seq_len=4096", "train.global_batch_tokens=4194304"]


def agreement(config: Config, pins: Pins | None = None) -> Verification:
    return verify(config, make(config, pins))


@pytest.mark.parametrize("name", MODELS)
def test_planner_and_engine_count_every_shipped_model_alike(name: str) -> None:
    model = load([f"model={name}"]).model
    shape, counts = from_config(model), accounting.parameters(model)
    params = model_params(shape)
    assert (params.total, params.active, params.matmul, params.router) == (
        counts.total,
        counts.active,
        counts.matmul,
        counts.router,
    )
    if model.window is None:  # the engine counts no windows yet
        assert megatron_flops(shape, 4096) == accounting.flops_per_token(model, 4096, "megatron")
    assert titan_flops(shape, 4096) == accounting.flops_per_token(model, 4096, "titan")


@pytest.mark.parametrize(
    "pins",
    [
        Pins(pp=1, tp=1, ep=4),
        Pins(pp=1, tp=1, ep=4, recompute="full"),
        Pins(pp=1, tp=2, ep=4, recompute="selective"),
        Pins(pp=1, tp=2, ep=2, recompute="layer"),
        Pins(pp=2, tp=1, ep=2, recompute="layer"),
        Pins(pp=2, tp=1, ep=2, recompute="full"),
        Pins(pp=2, tp=2, ep=2, schedule="Interleaved1F1B"),
        Pins(pp=2, tp=1, ep=1, schedule="ZBVZeroBubble"),
    ],
)
def test_tiny_agrees_in_every_dimension_and_recompute_mode(pins: Pins) -> None:
    result = agreement(load(["train.global_batch_tokens=8192"]), replace(pins, microbatch=8))
    assert result.agrees, report(result)
    assert abs(result.total.error) < 0.02, report(result)
    assert result.world == 4


def test_the_default_plan_of_tiny_agrees() -> None:
    result = agreement(load())
    assert result.agrees, report(result)


def test_a_rank_of_512_of_the_1t_model_agrees_with_fewer_layers() -> None:
    config = load(["model=moe_1t", "model.layers=4", "nodes=128", *ON_GPUS])
    result = agreement(config, Pins(pp=1, tp=1, ep=64, microbatch=2, recompute="full"))
    assert result.agrees, report(result)
    assert abs(result.total.error) < 0.02, report(result)


def test_the_planned_rank_of_mixtral_on_64_gpus_agrees_within_5_percent() -> None:
    result = agreement(load(["model=mixtral_8x7b", "nodes=16", *ON_GPUS]))
    assert result.agrees, report(result)
    assert result.world == 64
    state = {kind.name: kind.error for kind in result.kinds if kind.name in ("params", "grads", "optimizer")}
    assert all(abs(error) < 0.005 for error in state.values()), state


def test_replicas_and_experts_in_one_piece_agree_too() -> None:
    config = load(["model=olmoe_1b_7b", "nodes=2", *ON_GPUS])
    result = agreement(config, Pins(tp=1, pp=1, ep=1, dp_replicate=2, dp_shard=4, microbatch=1, recompute="none"))
    assert result.agrees, report(result)


def test_what_the_engine_cannot_build_is_said_and_not_verified() -> None:
    with pytest.raises(UserError, match=r"the engine has no model\.mla"):
        agreement(load(["model=deepseek_v3", "nodes=128", *ON_GPUS]))


def test_a_kind_off_by_more_than_5_percent_is_no_agreement() -> None:
    good, bad = Kind("params", 100.0, 101.0), Kind("activations", 100.0, 110.0)
    assert Verification("", 0, 1, (good,), good, (), 0.0).agrees
    assert not Verification("", 0, 1, (good, bad), good, (), 0.0).agrees
    assert not Verification("", 0, 1, (good,), bad, (), 0.0).agrees
