"""Tensor parallelism with a sequence-parallel stream: who holds which part of a sequence and of a weight, and how they meet.

Weights are DTensors (checkpoints and FSDP know their global shape); the mathematics runs on their local parts with these explicit
collectives (Korthikanti et al. 2022, section 4). Shapes: B batch, S sequence, s = S / tp, D hidden, V vocabulary, v = V / tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from hpcmoe.models.recompute import decided, exchanged


def local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this rank computes with.

    What all tp ranks hold whole meets different tokens or heads on each: its gradients are parts of a sum, which
    hpcmoe.engine.compute makes once a step.
    """
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """``layer`` with this rank's part of its weight and bias."""
    return F.linear(x, local(layer.weight), None if layer.bias is None else local(layer.bias))


class _Gather(torch.autograd.Function):
    """[B, s, ...] to [B, S, ...]; backward sums the ranks' gradients and keeps the own part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return tp.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.tp.reduce_scatter(grads[0]), None


class _Scatter(torch.autograd.Function):
    """Sums the ranks' [B, S, ...] and keeps the own part [B, s, ...]; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return exchanged(lambda: tp.reduce_scatter(x))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.tp.all_gather(grads[0]), None


class _Sum(torch.autograd.Function):
    """Sum over ranks; backward passes the gradient on as it is: each rank computes the same function of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        return decided(lambda: tp.all_reduce(x))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


@dataclass(frozen=True)
class TensorParallel:
    """The tp ranks of this rank. ``group`` None: it is alone and every method is the identity."""

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def gather(self, x_BsD: torch.Tensor) -> torch.Tensor:
        """The whole sequence, [B, S, D], of which each rank holds a consecutive part."""
        return x_BsD if self.group is None else _Gather.apply(x_BsD, self)

    def scatter(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """This rank's part [B, s, D] of the sum over ranks of ``x_BSD``."""
        return x_BSD if self.group is None else _Scatter.apply(x_BSD, self)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of a small tensor."""
        return x if self.group is None else _Sum.apply(x, self)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """No gradient; along dim 1."""
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_single(out, x.contiguous(), group=self.group)
        return out.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """No gradient."""
        out = x.clone()
        dist.all_reduce(out, group=self.group)
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """No gradient; along dim 1, whose size all ranks together divide."""
        parts = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        out = torch.empty_like(parts[0])
        dist.reduce_scatter_single(out, parts.flatten(0, 1), group=self.group)
        return out


ALONE = TensorParallel()


def embed(tokens_BS: torch.Tensor, weight_vD: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Rows of the table, of which each rank holds consecutive ones: this rank's part of the sequence, [B, s, D]."""
    weight_vD = local(weight_vD)
    if tp.group is None:
        return F.embedding(tokens_BS, weight_vD)
    rows = weight_vD.shape[0]
    own_BS = tokens_BS - tp.rank * rows
    mine_BS = (own_BS >= 0) & (own_BS < rows)
    x_BSD = F.embedding(own_BS.where(mine_BS, 0), weight_vD)
    return tp.scatter(x_BSD * mine_BS.unsqueeze(-1))


class _CrossEntropy(torch.autograd.Function):
    """Softmax over logits whose last dimension is split over ranks. Keeps the probabilities, as F.cross_entropy does."""

    @staticmethod
    def forward(ctx: Any, logits_Tv: torch.Tensor, targets_T: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        rows, width = torch.arange(len(targets_T), device=targets_T.device), logits_Tv.shape[1]
        own_T = targets_T - tp.rank * width
        mine_T = (own_T >= 0) & (own_T < width)
        own_T = own_T.where(mine_T, 0)
        highest_T = logits_Tv.amax(-1)
        dist.all_reduce(highest_T, dist.ReduceOp.MAX, group=tp.group)
        shifted_Tv = logits_Tv - highest_T.unsqueeze(-1)
        chosen_T = shifted_Tv[rows, own_T] * mine_T
        exp_Tv = shifted_Tv.exp_()
        sums = torch.stack((exp_Tv.sum(-1), chosen_T))
        dist.all_reduce(sums, group=tp.group)
        ctx.save_for_backward(exp_Tv.div_(sums[0].unsqueeze(-1)), own_T, mine_T)
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probs_Tv, own_T, mine_T = ctx.saved_tensors
        grad_Tv = probs_Tv.clone()
        grad_Tv[torch.arange(len(own_T), device=own_T.device), own_T] -= mine_T.to(grad_Tv.dtype)
        return grad_Tv * grads[0], None, None


def cross_entropy(logits_BSv: torch.Tensor, targets_BS: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Sum of the tokens' cross entropies, an fp32 scalar that is the same on all tp ranks."""
    logits_Tv, targets_T = logits_BSv.flatten(0, 1).float(), targets_BS.flatten()
    if tp.group is None:
        return F.cross_entropy(logits_Tv, targets_T, reduction="sum")
    return _CrossEntropy.apply(logits_Tv, targets_T, tp)
