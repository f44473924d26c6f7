"""The decoder MoE transformer: pre-norm blocks of attention and (MoE or dense) feed-forward. Knows nothing of ranks.

Layers keep their global number as name, so that a parameter's name means the same in every layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.models.attention import Attention, rope_tables
from hpcmoe.models.moe import LayerLoad, MoE, SwiGLU
from hpcmoe.models.norm import RMSNorm
from hpcmoe.models.support import check_model


class Block(nn.Module):
    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden, model.norm_eps)
        self.attention = Attention(model)
        self.ffn_norm = RMSNorm(model.hidden, model.norm_eps)
        self.dense = SwiGLU(model.hidden, model.ffn) if layer < model.first_dense_layers else None
        self.moe = MoE(model) if layer >= model.first_dense_layers else None

    def forward(
        self, x_BSD: torch.Tensor, cos_SC: torch.Tensor, sin_SC: torch.Tensor, loss_weight: float
    ) -> tuple[torch.Tensor, LayerLoad | None]:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SC, sin_SC)
        inner = self.ffn_norm(x_BSD)
        if self.moe is None:
            assert self.dense is not None
            return x_BSD + self.dense(inner), None
        out, load = self.moe(inner, loss_weight)
        return x_BSD + out, load


class Transformer(nn.Module):
    """Token ids to logits. ``loads`` holds each MoE layer's load by layer number, a list entry a microbatch, until drained."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        check_model(model)
        self.model = model
        self.embed = nn.Embedding(model.vocab_size, model.hidden)
        self.layers = nn.ModuleDict({str(i): Block(model, i) for i in range(model.layers)})
        self.norm = RMSNorm(model.hidden, model.norm_eps)
        self.head = None if model.tied_embeddings else nn.Linear(model.hidden, model.vocab_size, bias=False)
        self.loads: dict[int, list[LayerLoad]] = {}

    def forward(self, tokens_BS: torch.Tensor, loss_weight: float = 1.0) -> torch.Tensor:
        """Logits [B, S, V] in the compute dtype. Loads are kept in training mode only."""
        cos_SC, sin_SC = rope_tables(tokens_BS.shape[1], self.model.head_dim, self.model.rope_theta, tokens_BS.device)
        x_BSD = self.embed(tokens_BS)
        for name, block in self.layers.items():
            x_BSD, load = block(x_BSD, cos_SC, sin_SC, loss_weight)
            if load is not None and self.training:
                self.loads.setdefault(int(name), []).append(load)
        x_BSD = self.norm(x_BSD)
        return F.linear(x_BSD, self.embed.weight) if self.head is None else self.head(x_BSD)

    def moe_layers(self) -> dict[int, MoE]:
        """The MoE layers that live here, by layer number."""
        return {int(name): block.moe for name, block in self.layers.items() if isinstance(block.moe, MoE)}

    def drain_loads(self) -> dict[int, list[LayerLoad]]:
        """The loads since the last call, which forgets them."""
        loads, self.loads = self.loads, {}
        return loads


def init_std(name: str, model: ModelConfig) -> float | None:
    """Standard deviation of a parameter's initial values by its name; None: ones (norms); 0: zeros (biases).

    Output projections of the residual stream are scaled by 1/sqrt(2 x layers) (GPT-2).
    """
    leaf = name.rsplit(".", 1)[-1]
    if "norm" in name:
        return None
    if leaf == "bias":
        return 0.0
    residual = ".wo." in name or ".w2." in name or leaf == "w2_EDF"
    return model.init_std / (2 * model.layers) ** 0.5 if residual else model.init_std
