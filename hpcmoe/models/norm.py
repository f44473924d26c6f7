"""Root-mean-square norm (Zhang & Sennrich 2019): fp32 arithmetic whatever the dtype; keeps its input and one number a row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpcmoe.models.tensor_parallel import local


class _RMSNorm(torch.autograd.Function):
    """Where torch has no fused kernel: its composite takes three times as long on a CPU, and keeps two fp32 copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad, normed, weight32 = grads[0].float(), x.float() * scale, weight.float()
        by_weight = (grad * normed).flatten(0, -2)
        mean = torch.mv(by_weight, weight32).div_(x.shape[-1]).view(scale.shape)
        grad_x = (grad * weight32).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), by_weight.sum(0).to(weight.dtype), None


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight)
        return F.rms_norm(x, weight.shape, weight, self.eps) if x.is_cuda else _RMSNorm.apply(x, weight, self.eps)
