"""Root-mean-square norm (Zhang & Sennrich 2019). Computes in fp32 whatever the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hpcmoe.models.tensor_parallel import local


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, local(self.weight), self.eps)
