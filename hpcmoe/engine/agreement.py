"""The step's one collective: everything that all ranks must agree on, as one sum of a small fp64 vector.

Losses, counts, the gradient norm, and whether anyone was asked to stop or save. Not for deciding (the trainer does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class StepSums:
    """A rank's own figures before ``reduce``, the world's after it."""

    loss_sum: torch.Tensor  # sum of the tokens' cross entropies
    tokens: int
    aux: torch.Tensor  # balance loss weighed by share of tokens, summed over layers
    z: torch.Tensor
    grad_squared: torch.Tensor
    counts_LE: torch.Tensor  # assignments by MoE layer and expert


@dataclass(frozen=True)
class Agreed:
    """The same on every rank."""

    loss: float  # mean over the step's tokens
    tokens: int
    aux: float
    z: float
    grad_norm: float
    counts_LE: torch.Tensor  # fp64 on CPU
    signal: bool
    control_stop: bool
    control_save: bool


def reduce_step(sums: StepSums, signal: bool, control_stop: bool, control_save: bool) -> Agreed:
    """All-reduce over the world; one host sync."""
    device = sums.counts_LE.device
    flags = torch.tensor([sums.tokens, signal, control_stop, control_save], dtype=torch.float64).to(device)
    scalars = torch.stack([sums.loss_sum.double(), sums.aux.double(), sums.z.double(), sums.grad_squared.double()])
    vector = torch.cat((flags, scalars, sums.counts_LE.double().flatten()))
    dist.all_reduce(vector)
    vector = vector.cpu()
    tokens, signals, stops, saves, loss_sum, aux, z, grad_squared = vector[:8].tolist()
    return Agreed(
        loss=loss_sum / tokens,
        tokens=int(tokens),
        aux=aux,
        z=z,
        grad_norm=grad_squared**0.5,
        counts_LE=vector[8:].view(sums.counts_LE.shape),
        signal=signals > 0,
        control_stop=stops > 0,
        control_save=saves > 0,
    )


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` holds on any rank. For start-up only: in training it rides in ``reduce_step``."""
    tensor = torch.tensor([float(flag)], device=device)
    dist.all_reduce(tensor)
    return bool(tensor.item() > 0)
