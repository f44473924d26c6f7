"""The routed experts over rows sorted by expert. Shapes: E experts, P padded rows, D hidden, F expert width, I/O in and out.

w1 gate and w3 up are [E, F, D], w2 down is [E, D, F]: each expert's matrix lies as nn.Linear's does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from hpcmoe.models import accounting
from hpcmoe.models.dispatch import RowLayout
from hpcmoe.models.recompute import PRODUCTS, keep
from hpcmoe.models.tensor_parallel import local

Kernel = Literal["grouped_mm", "padded_bmm", "loop"]
Matmul = Callable[[torch.Tensor, torch.Tensor, RowLayout], torch.Tensor]


def choose_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The fastest exact kernel: grouped_mm on CPUs and on GPUs that have a fused one (sm90 and newer, bf16), else padded bmm.

    On sm80 grouped_mm falls back to a loop with a host sync for each call (pytorch#186620).
    """
    if device.type != "cuda":
        return "grouped_mm"
    fused = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
    return "grouped_mm" if fused else "padded_bmm"


def row_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """Each expert's rows are padded to this: few shapes for bf16 on CPU (oneDNN compiles one kernel each), whole tiles on GPU."""
    if device.type == "cuda":
        return 16
    return 64 if dtype == torch.bfloat16 else 1


def _grouped(x_PI: torch.Tensor, w_EOI: torch.Tensor, rows: RowLayout) -> torch.Tensor:
    return F.grouped_mm(x_PI, w_EOI.transpose(-1, -2), offs=rows.ends_E)


def _bmm(x_PI: torch.Tensor, w_EOI: torch.Tensor, rows: RowLayout) -> torch.Tensor:
    experts = w_EOI.shape[0]
    return torch.bmm(x_PI.view(experts, -1, x_PI.shape[-1]), w_EOI.transpose(-1, -2)).flatten(0, 1)


def _loop(x_PI: torch.Tensor, w_EOI: torch.Tensor, rows: RowLayout) -> torch.Tensor:
    parts = [F.linear(x, w) for x, w in zip(x_PI.split(rows.sizes), w_EOI.unbind(), strict=True)]
    return torch.cat(parts)


MATMULS: dict[Kernel, Matmul] = {"grouped_mm": _grouped, "padded_bmm": _bmm, "loop": _loop}


class Experts(nn.Module):
    """All routed experts of a layer, or this rank's share of them once hpcmoe.engine.parallelize has split dim 0."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.empty(experts, width, hidden))
        self.w2_EDF = nn.Parameter(torch.empty(experts, hidden, width))
        self.w3_EFD = nn.Parameter(torch.empty(experts, width, hidden))

    def num_params(self) -> int:
        """Of all experts, wherever they live."""
        return self._counts(top_k=1).total

    def num_flops_per_token(self, top_k: int) -> int:
        """Forward and backward of the ``top_k`` experts that a token goes to; the same in all conventions."""
        return accounting.flops(self._counts(top_k), 0, "titan")

    def _counts(self, top_k: int) -> accounting.Parameters:
        count, width, hidden = self.w1_EFD.shape
        return accounting.experts(count, top_k, hidden, width)

    def forward(self, x_PD: torch.Tensor, rows: RowLayout, kernel: Kernel, sent: bool = False) -> torch.Tensor:
        """``sent``: the outputs go to other ranks and are not read here."""
        w1, w2, w3 = (local(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        matmul = MATMULS[kernel]
        with keep(PRODUCTS):
            gate_PF, up_PF = matmul(x_PD, w1, rows), matmul(x_PD, w3, rows)
        hidden_PF = F.silu(gate_PF) * up_PF
        with keep(PRODUCTS, needed=not sent):
            return matmul(hidden_PF, w2, rows)
