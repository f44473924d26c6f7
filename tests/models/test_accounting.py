"""Counts equal the built module's, the planner's, and what the papers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcmoe.config.model_schema import MlaConfig, ModelConfig
from hpcmoe.models.accounting import CONVENTIONS, flops_per_token, parameters
from hpcmoe.models.transformer import Transformer
from hpcmoe.planner.flops import megatron_flops, titan_flops
from hpcmoe.planner.params import model_params
from hpcmoe.planner.shapes import from_config


def model(**values: Any) -> ModelConfig:
    small: dict[str, Any] = {
        "name": "m",
        "vocab_size": 300,
        "hidden": 24,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "experts": 6,
        "top_k": 2,
        "expert_ffn": 10,
    }
    return ModelConfig(**(small | values))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied_embeddings": True},
    "biases": {"attention_bias": True, "attention_out_bias": True, "router_bias": True},
    "shared": {"shared_experts": 2, "shared_gate": True, "qk_norm": True},
    "dense first": {"first_dense_layers": 2, "ffn": 40, "shared_ffn": 12},
    "all dense": {"first_dense_layers": 3, "ffn": 40},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_totals_are_the_built_modules(name: str) -> None:
    config = model(**VARIANTS[name])
    with torch.device("meta"):
        built = Transformer(config)
    assert parameters(config).total == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_engine_and_planner_count_alike(name: str) -> None:
    config = model(**VARIANTS[name])
    planned, counted = model_params(from_config(config)), parameters(config)
    assert (planned.total, planned.active, planned.matmul, planned.router) == (
        counted.total,
        counted.active,
        counted.matmul,
        counted.router,
    )
    assert flops_per_token(config, 64, "titan") == titan_flops(from_config(config), 64)
    assert flops_per_token(config, 64, "megatron") == megatron_flops(from_config(config), 64)


def big(**values: Any) -> ModelConfig:
    return ModelConfig(name="big", **values)


MIXTRAL = big(vocab_size=32000, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, experts=8, top_k=2, expert_ffn=14336)
QWEN3_235B = big(
    vocab_size=151936,
    hidden=4096,
    layers=94,
    heads=64,
    kv_heads=4,
    head_dim=128,
    qk_norm=True,
    experts=128,
    top_k=8,
    expert_ffn=1536,
)
QWEN3_30B = big(
    vocab_size=50304,
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    qk_norm=True,
    experts=128,
    top_k=8,
    expert_ffn=768,
)
QWEN2_57B = big(
    vocab_size=151936,
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    attention_bias=True,
    experts=64,
    top_k=8,
    expert_ffn=2560,
    shared_ffn=20480,
    shared_gate=True,
)
DEEPSEEK_V3 = big(
    vocab_size=129280,
    hidden=7168,
    layers=61,
    heads=128,
    kv_heads=128,
    head_dim=128,
    mla=MlaConfig(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    ffn=18432,
    first_dense_layers=3,
    experts=256,
    top_k=8,
    expert_ffn=2048,
    shared_experts=1,
)


@pytest.mark.parametrize(
    ("config", "billions"),
    [(MIXTRAL, 46.70), (QWEN3_235B, 235.09), (QWEN2_57B, 57.41), (DEEPSEEK_V3, 671.03)],
    ids=["Mixtral-8x7B", "Qwen3-235B", "Qwen2-57B", "DeepSeek-V3"],
)
def test_published_totals_come_out(config: ModelConfig, billions: float) -> None:
    assert parameters(config).total / 1e9 == pytest.approx(billions, abs=0.006)


def test_one_model_costs_26_665_or_21_757_gflop_by_convention() -> None:
    assert flops_per_token(QWEN3_30B, 4096, "titan") / 1e9 == pytest.approx(26.665, abs=5e-4)
    assert flops_per_token(QWEN3_30B, 4096, "megatron") / 1e9 == pytest.approx(21.757, abs=5e-4)


def test_flops_count_active_experts_only() -> None:
    few, many = model(experts=4), model(experts=400)
    router = 6 * 3 * 24 * 396
    assert flops_per_token(many, 64, "titan") - flops_per_token(few, 64, "titan") == router
    assert flops_per_token(many, 64, "megatron") == flops_per_token(few, 64, "megatron")


def test_a_convention_without_a_name_is_refused() -> None:
    assert CONVENTIONS == ("titan", "megatron")
    with pytest.raises(ValueError, match="no FLOP convention"):
        flops_per_token(model(), 64, "palm")  # type: ignore[arg-type]
