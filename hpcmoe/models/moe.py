"""The MoE feed-forward layer: router, routed experts, shared experts, balancing losses. Shapes: see router and dispatch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.models import accounting
from hpcmoe.models.dispatch import RowLayout, run_experts
from hpcmoe.models.experts import Experts, Kernel, choose_kernel, row_multiple
from hpcmoe.models.recompute import PRODUCTS, decided, keep
from hpcmoe.models.router import Router, balance_loss, z_loss
from hpcmoe.models.support import shared_width
from hpcmoe.models.tensor_parallel import ALONE, linear


class LayerLoad(NamedTuple):
    """What a MoE layer tells about one microbatch; carries no gradient. Sums over tp ranks are the microbatch's figures."""

    counts_E: torch.Tensor  # int64, assignments an expert
    aux: torch.Tensor  # balance loss, 1 when balanced
    z: torch.Tensor


class _AttachLoss(torch.autograd.Function):
    """Passes ``carrier`` through; backward also sends gradient 1 into ``loss``. The loss needs no path to the model's output."""

    @staticmethod
    def forward(ctx: Any, carrier: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0], torch.ones_like(ctx.like)


class SwiGLU(nn.Module):
    """Dense feed-forward: w2(silu(w1 x) * w3 x)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)
        self.tp = ALONE  # set by hpcmoe.engine.parallelize

    def num_params(self) -> int:
        return accounting.swiglu(self.w1.in_features, self.w1.out_features).total

    def num_flops_per_token(self) -> int:
        """Forward and backward; the same in all conventions."""
        return accounting.flops(accounting.swiglu(self.w1.in_features, self.w1.out_features), 0, "titan")

    def forward(self, x_BsD: torch.Tensor) -> torch.Tensor:
        x_BSD = self.tp.gather(x_BsD)
        with keep(PRODUCTS):
            gate, up = linear(x_BSD, self.w1), linear(x_BSD, self.w3)
        inner = F.silu(gate) * up
        with keep(PRODUCTS, needed=self.tp.group is None):
            out_BSD = linear(inner, self.w2)
        return self.tp.scatter(out_BSD)


class MoE(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.router = Router(model)
        self.experts = Experts(model.experts, model.hidden, model.expert_ffn)
        width = shared_width(model)
        self.shared = SwiGLU(model.hidden, width) if width else None
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if model.shared_gate else None
        self.tp = ALONE  # set by hpcmoe.engine.parallelize, as is the next
        self.ep_group: dist.ProcessGroup | None = None
        self.kernel: Kernel | None = None  # None: chosen for the device

    def num_params(self) -> int:
        return accounting.moe(self.model).total

    def num_flops_per_token(self, convention: accounting.Convention) -> int:
        return accounting.flops(accounting.moe(self.model), 0, convention)

    def forward(self, x_BSD: torch.Tensor, loss_weight: float) -> tuple[torch.Tensor, LayerLoad]:
        """``loss_weight``: the microbatch's share of the step's tokens; the balancing losses are weighed by it.

        ``x_BSD`` holds this rank's tokens: under tensor parallelism its part of the sequences.
        """
        x_TD = x_BSD.flatten(0, 1)
        routing = self.router(x_TD)
        counts_E = decided(lambda: torch.bincount(routing.experts_TK.flatten(), minlength=self.model.experts))
        kernel = self.kernel or choose_kernel(x_TD.device, x_TD.dtype)

        def compute(x_PD: torch.Tensor, rows: RowLayout) -> torch.Tensor:
            return self.experts(x_PD, rows, kernel, sent=self.ep_group is not None)

        multiple = row_multiple(x_TD.device, x_TD.dtype)
        same_size = kernel == "padded_bmm"
        out_TD = run_experts(x_TD, routing.experts_TK, routing.weights_TK, counts_E, compute, multiple, same_size, self.ep_group)
        if self.shared is not None:
            shared_TD = self.shared(x_BSD).flatten(0, 1)
            out_TD = out_TD + (shared_TD if self.shared_gate is None else linear(x_TD, self.shared_gate).sigmoid() * shared_TD)
        # every tp rank has the whole balance loss and sends its gradient to its own tokens; z is a mean over its tokens only
        aux = balance_loss(routing.probs_TE, counts_E, self.model.top_k, self.tp)
        z = z_loss(routing.logits_TE) / self.tp.size
        extra = self.model.aux_loss_coef * aux + self.model.z_loss_coef * z
        if self.model.aux_loss_coef or self.model.z_loss_coef:
            out_TD = _AttachLoss.apply(out_TD, extra * loss_weight)
        return out_TD.view_as(x_BSD), LayerLoad(counts_E, aux.detach() / self.tp.size, z.detach())
