"""Grouped-query causal attention with rotary positions. Shapes: B batch, S sequence, D hidden, H heads, G kv heads, C head dim.

A tensor-parallel rank has H / tp heads over the whole sequence and gives and takes s = S / tp positions. Not for latent
attention, windows or sinks (hpcmoe.models.support refuses them).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.models import accounting
from hpcmoe.models.norm import RMSNorm
from hpcmoe.models.recompute import ATTENTION, PRODUCTS, keep
from hpcmoe.models.tensor_parallel import ALONE, linear, local


def rope_tables(seq_len: int, head_dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position's angles, each [S, C] in fp32 (Su et al. 2021; the two halves of a head are the pairs)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), theta**-exponent)
    angles_SC = torch.cat((angles, angles), dim=-1)
    return angles_SC.cos(), angles_SC.sin()


def rotate(x_BHSC: torch.Tensor, cos_SC: torch.Tensor, sin_SC: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + C/2) of a head by its position's angle, in fp32."""
    x = x_BHSC.float()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos_SC + turned * sin_SC).to(x_BHSC.dtype)


class Attention(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.heads, self.kv_heads, self.head_dim = model.heads, model.kv_heads, model.head_dim
        q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.wq = nn.Linear(model.hidden, q_width, bias=model.attention_bias)
        self.wk = nn.Linear(model.hidden, kv_width, bias=model.attention_bias)
        self.wv = nn.Linear(model.hidden, kv_width, bias=model.attention_bias)
        self.wo = nn.Linear(q_width, model.hidden, bias=model.attention_out_bias)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.tp = ALONE  # set by hpcmoe.engine.parallelize
        # Around what this rank computes by itself, between two collectives; set by hpcmoe.engine.pace
        self.clock: Callable[[], AbstractContextManager[None]] = nullcontext

    def num_params(self) -> int:
        return accounting.attention(self.model).total

    def num_flops_per_token(self, seq_len: int, convention: accounting.Convention) -> int:
        """Forward and backward; see hpcmoe.models.accounting for the conventions."""
        square = accounting.attention_square(self.model, seq_len)
        return accounting.flops(accounting.attention(self.model), square, convention)

    def forward(self, x_BsD: torch.Tensor, cos_SC: torch.Tensor, sin_SC: torch.Tensor) -> torch.Tensor:
        x_BSD = self.tp.gather(x_BsD)
        with self.clock():
            out = self._own_heads(x_BSD, cos_SC, sin_SC)
        out_BsD = self.tp.scatter(out)
        return out_BsD if self.wo.bias is None else out_BsD + local(self.wo.bias)

    def _own_heads(self, x_BSD: torch.Tensor, cos_SC: torch.Tensor, sin_SC: torch.Tensor) -> torch.Tensor:
        """This rank's heads, and their part of the output's sum."""
        B, S, _ = x_BSD.shape
        with keep(PRODUCTS):
            q = linear(x_BSD, self.wq).view(B, S, -1, self.head_dim)
            k = linear(x_BSD, self.wk).view(B, S, -1, self.head_dim)
            v = linear(x_BSD, self.wv).view(B, S, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = rotate(q, cos_SC, sin_SC), rotate(k, cos_SC, sin_SC)
        with keep(ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        out = out.transpose(1, 2).reshape(B, S, -1)
        with keep(PRODUCTS, needed=self.tp.group is None):
            return F.linear(out, local(self.wo.weight))
