"""The decoder MoE transformer: pre-norm blocks of attention and (MoE or dense) feed-forward; whole, or one pipeline stage of it.

Layers keep their global number as name, so that a parameter's name means the same in every layout. Shapes: B batch, S sequence,
s = S / tp the part of it that this rank holds between blocks (all of it without tensor parallelism), D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.models import accounting
from hpcmoe.models.attention import Attention, rope_tables
from hpcmoe.models.moe import LayerLoad, MoE, SwiGLU
from hpcmoe.models.norm import RMSNorm
from hpcmoe.models.recompute import Mode, mode_of_layer, through
from hpcmoe.models.support import check_model
from hpcmoe.models.tensor_parallel import ALONE, embed, local


@dataclass(frozen=True)
class Part:
    """What a pipeline stage holds: consecutive layers, and the ends if it is the first or the last."""

    layers: range
    first: bool = True
    last: bool = True


class Block(nn.Module):
    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        self.attention_norm = RMSNorm(model.hidden, model.norm_eps)
        self.attention = Attention(model)
        self.ffn_norm = RMSNorm(model.hidden, model.norm_eps)
        self.dense = SwiGLU(model.hidden, model.ffn) if layer < model.first_dense_layers else None
        self.moe = MoE(model) if layer >= model.first_dense_layers else None
        self.recompute: Mode = "none"

    def num_params(self) -> int:
        return accounting.block(self.model, self.layer).total

    def num_flops_per_token(self, seq_len: int, convention: accounting.Convention) -> int:
        square = accounting.attention_square(self.model, seq_len)
        return accounting.flops(accounting.block(self.model, self.layer), square, convention)

    def forward(
        self, x_BsD: torch.Tensor, cos_SC: torch.Tensor, sin_SC: torch.Tensor, loss_weight: float
    ) -> tuple[torch.Tensor, LayerLoad | None]:
        return through(self._forward, self.recompute, x_BsD, cos_SC, sin_SC, loss_weight)

    def _forward(
        self, x_BsD: torch.Tensor, cos_SC: torch.Tensor, sin_SC: torch.Tensor, loss_weight: float
    ) -> tuple[torch.Tensor, LayerLoad | None]:
        x_BsD = x_BsD + self.attention(self.attention_norm(x_BsD), cos_SC, sin_SC)
        inner = self.ffn_norm(x_BsD)
        if self.moe is None:
            assert self.dense is not None
            return x_BsD + self.dense(inner), None
        out, load = self.moe(inner, loss_weight)
        return x_BsD + out, load


class Transformer(nn.Module):
    """Token ids to logits, or ``part``'s share of the way: hidden states where the part is not the first, or not the last.

    ``loads`` holds each MoE layer's load by layer number, a list entry a microbatch, until drained.
    """

    def __init__(self, model: ModelConfig, part: Part | None = None) -> None:
        super().__init__()
        check_model(model)
        self.model = model
        self.part = part or Part(range(model.layers))
        ties = model.tied_embeddings and self.part.last
        if ties and not self.part.first:
            raise ValueError("tied embeddings need the first and the last layer in one part")
        self.embed = nn.Embedding(model.vocab_size, model.hidden) if self.part.first else None
        self.layers = nn.ModuleDict({str(i): Block(model, i) for i in self.part.layers})
        self.norm = RMSNorm(model.hidden, model.norm_eps) if self.part.last else None
        self.head = nn.Linear(model.hidden, model.vocab_size, bias=False) if self.part.last and not ties else None
        self.tp = ALONE  # set by hpcmoe.engine.parallelize
        self.loss_weight = 1.0  # the microbatch's share of the step's tokens: the balancing losses are weighed by it
        self.loads: dict[int, list[LayerLoad]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S] or hidden states [B, s, D] to hidden states [B, s, D] or logits [B, S, V / tp], in the compute dtype.

        Loads are kept in training mode only.
        """
        seq_len = x.shape[1] if self.embed is not None else x.shape[1] * self.tp.size
        cos_SC, sin_SC = rope_tables(seq_len, self.model.head_dim, self.model.rope_theta, x.device)
        x_BsD = x if self.embed is None else embed(x, self.embed.weight, self.tp)
        for name, block in self.layers.items():
            x_BsD, load = block(x_BsD, cos_SC, sin_SC, self.loss_weight)
            if load is not None and self.training:
                self.loads.setdefault(int(name), []).append(load)
        if self.norm is None:
            return x_BsD
        table = self.head if self.head is not None else self.embed
        assert table is not None
        return F.linear(self.tp.gather(self.norm(x_BsD)), local(table.weight))

    def num_params(self) -> int:
        """Of this part, unsharded."""
        return self._counts().total

    def num_flops_per_token(self, seq_len: int, convention: accounting.Convention) -> int:
        """Forward and backward of this part; the parts of a model add up to hpcmoe.models.accounting.flops_per_token."""
        squares = len(self.part.layers) * accounting.attention_square(self.model, seq_len)
        return accounting.flops(self._counts(), squares, convention)

    def _counts(self) -> accounting.Parameters:
        return accounting.part(self.model, self.part.layers, self.part.first, self.part.last)

    def set_recompute(self, recompute: str) -> None:
        """``recompute``: layout.recompute's word (hpcmoe.models.recompute)."""
        for name, block in self.layers.items():
            assert isinstance(block, Block)
            block.recompute = mode_of_layer(recompute, int(name))

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
