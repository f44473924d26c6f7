"""Counts equal the built module's, the planner's, and what the papers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcmoe.config.compose import load
from hpcmoe.config.model_schema import MlaConfig, ModelConfig
from hpcmoe.models.accounting import CONVENTIONS, Convention, flops_per_token, parameters
from hpcmoe.models.attention import Attention
from hpcmoe.models.experts import Experts
from hpcmoe.models.moe import MoE, SwiGLU
from hpcmoe.models.partition import split
from hpcmoe.models.support import unsupported_features
from hpcmoe.models.transformer import Block, Part, Transformer
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
def test_each_module_counts_its_own_parameters(name: str) -> None:
    with torch.device("meta"):
        built = Transformer(model(**VARIANTS[name]))
    counting = [
        module for module in built.modules() if isinstance(module, Transformer | Block | Attention | MoE | SwiGLU | Experts)
    ]
    assert len(counting) > 2 * len(built.layers)
    for module in counting:
        assert module.num_params() == sum(p.numel() for p in module.parameters()), type(module).__name__


def with_modules(config: ModelConfig, seq_len: int, convention: Convention) -> int:
    """A block's FLOPs a token, added up from the modules inside the whole model's blocks, and the head's."""
    with torch.device("meta"):
        built = Transformer(config)
    total = 6 * config.vocab_size * config.hidden
    for block in built.layers.values():
        assert isinstance(block, Block)
        inside = block.attention.num_flops_per_token(seq_len, convention)
        if block.dense is not None:
            inside += block.dense.num_flops_per_token()
        if block.moe is not None:
            inside += block.moe.num_flops_per_token(convention)
            moe = block.moe.experts.num_flops_per_token(config.top_k)
            moe += 0 if block.moe.shared is None else block.moe.shared.num_flops_per_token()
            gate = 6 * config.hidden * config.shared_gate
            routing = 6 * config.hidden * config.experts if convention == "titan" else 0
            assert block.moe.num_flops_per_token(convention) == moe + gate + routing
        assert block.num_flops_per_token(seq_len, convention) == inside
        total += inside
    assert built.num_flops_per_token(seq_len, convention) == total
    return total


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_modules_flops_add_up_to_the_models(name: str, convention: Convention) -> None:
    config = model(**VARIANTS[name])
    assert with_modules(config, 64, convention) == flops_per_token(config, 64, convention)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_pipelines_stages_add_up_to_the_model(convention: Convention) -> None:
    config = model(layers=7, first_dense_layers=2, ffn=40, shared_experts=1)
    stages = split(config, 64, 3)
    with torch.device("meta"):
        parts = [Transformer(config, Part(layers, first=i == 0, last=i == 2)) for i, layers in enumerate(stages)]
    assert sum(part.num_params() for part in parts) == parameters(config).total
    assert sum(part.num_flops_per_token(64, convention) for part in parts) == flops_per_token(config, 64, convention)


CONFIGURED = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))


@pytest.mark.parametrize("name", CONFIGURED)
def test_every_configured_model_is_counted_alike_by_module_formula_and_planner(name: str) -> None:
    config = load([f"model={name}"]).model
    counted, planned = parameters(config), model_params(from_config(config))
    assert (planned.total, planned.active, planned.matmul) == (counted.total, counted.active, counted.matmul)
    whole = replace(config, window=None)  # the conventions know no windows
    assert flops_per_token(config, 4096, "titan") == titan_flops(from_config(whole), 4096)
    assert flops_per_token(config, 4096, "megatron") == megatron_flops(from_config(whole), 4096)
    if not unsupported_features(config):
        with torch.device("meta"):
            built = Transformer(config)
        assert built.num_params() == sum(p.numel() for p in built.parameters()) == counted.total


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
