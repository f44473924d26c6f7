"""What every layout must reproduce: plain training in one process that knows nothing of layouts, in several settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.config.schema import Config, LayoutConfig, OptimConfig
from hpcmoe.data.corpus import load_corpus
from hpcmoe.data.loader import Loader
from hpcmoe.engine.parallelize import initial_values
from hpcmoe.engine.schedule import learning_rate
from hpcmoe.models.moe import MoE
from tests.engine.ranks import small_config, small_model

STEPS = 10
# Everything the layer can do at once: a dense layer, shared experts behind a gate, groups, both losses, both biases.
FULL = small_model(
    layers=2,
    ffn=48,
    first_dense_layers=1,
    shared_experts=1,
    shared_gate=True,
    qk_norm=True,
    attention_bias=True,
    attention_out_bias=True,
    router_bias=True,
    score="sigmoid",
    route_scale=1.5,
    groups=4,
    top_groups=2,
    z_loss_coef=0.001,
    bias_update_rate=0.01,
)


@dataclass(frozen=True)
class Setting:
    """What is trained. ``tie``: all experts have the same score in the first step."""

    model: ModelConfig
    batch: int = 4
    seq_len: int = 16
    microbatch: int = 1
    tie: bool = False


PLAIN = small_model(layers=2)
SETTINGS = {
    "full": Setting(FULL),
    "four layers": Setting(replace(FULL, layers=4)),
    "eight layers": Setting(replace(FULL, layers=8)),
    "eight layers, eight sequences": Setting(replace(FULL, layers=8), batch=8),
    "pairs": Setting(FULL, batch=8, microbatch=2),
    "odd batch": Setting(PLAIN, batch=6),
    "one token": Setting(PLAIN, batch=4, seq_len=1),
    "ties": Setting(PLAIN, tie=True),
}


def case_config(text: Path, layout: LayoutConfig, setting: Setting = SETTINGS["full"]) -> Config:
    """The config of ``setting`` under ``layout``. The norm is above the clipping limit in every step."""
    world = layout.pp * layout.tp * (layout.dp_shard or 1) * layout.dp_replicate
    tokens = setting.batch * setting.seq_len
    config = small_config(text, world, 1, STEPS, model=setting.model, layout=replace(layout, microbatch=setting.microbatch))
    config.train = replace(config.train, seq_len=setting.seq_len, global_batch_tokens=tokens)
    config.optim = OptimConfig(lr=2e-3, warmup_steps=2, clip_norm=0.05, eps=1e-6)
    return config


def loader_of(config: Config) -> Loader:
    return Loader(load_corpus(config.data), config.train.seq_len, config.train.seed)


@torch.no_grad()
def make_ties(layers: dict[int, MoE]) -> None:
    """All routers score all experts alike."""
    for moe in layers.values():
        moe.router.weight.zero_()


def reference(text: Path, setting: Setting) -> list[dict[str, Any]]:
    """Each step of a plain loop: one model, microbatches in turn, torch's own clipping and AdamW."""
    config = case_config(text, LayoutConfig(dp_shard=1, ep=1), setting)
    loader, optim, share = loader_of(config), config.optim, setting.microbatch / setting.batch
    model = initial_values(config.model, config.train.seed)
    if setting.tie:
        make_ties(model.moe_layers())
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps)
    model.loss_weight = share
    steps = []
    for step in range(1, STEPS + 1):
        total = 0.0
        for first in range((step - 1) * setting.batch, step * setting.batch, setting.microbatch):
            inputs, targets = loader.batch(first, setting.microbatch)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss * share).backward()
            total += loss.item() * share
        counts = {layer: torch.stack([load.counts_E for load in loads]).sum(0) for layer, loads in model.drain_loads().items()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm).item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train.steps, optim)
        optimizer.step()
        optimizer.zero_grad()
        for layer, moe in model.moe_layers().items():
            assert moe.router.balance_E is not None
            load = counts[layer].double()
            moe.router.balance_E += config.model.bias_update_rate * torch.sign(load.mean() - load).float()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        stacked = torch.stack([counts[layer].double() for layer in sorted(counts)])
        steps.append({"loss": total, "norm": norm, "gradients": gradients, "counts": stacked, "state": state})
    return steps
