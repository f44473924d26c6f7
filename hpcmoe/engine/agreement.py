"""The step's one collective: everything that all ranks must agree on, as one sum of a small fp64 vector.

Losses, counts, the gradient norm, and whether anyone was asked to stop or save; what is not finite on one rank is so for all.
Evaluation has a smaller one of its own, a batch. Not for deciding (the trainer does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcmoe.engine.stop import Asked
from hpcmoe.engine.verdict import Source


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
    save: bool  # rank 0 wants a checkpoint after this step
    limit: bool = False  # rank 0 sees the job's end so near that this must be the last step
    own_s: tuple[float, ...] = ()  # by rank: seconds that it computed by itself (hpcmoe.engine.pace)

    @property
    def stop(self) -> Source | None:
        return _source(self.signal, self.control_stop) or ("time_limit" if self.limit else None)


@dataclass(frozen=True)
class AgreedEvaluation:
    """The same on every rank."""

    loss_sum: float
    tokens: int
    stop: Source | None


def _source(signal: bool, control: bool) -> Source | None:
    """A person's word weighs more: such a run stays stopped."""
    return "control" if control else "signal" if signal else None


def reduce_step(sums: StepSums, signal: bool, control_stop: bool, save: bool, limit: bool = False, own_s: float = 0.0) -> Agreed:
    """All-reduce over the world; one host sync. ``own_s``: seconds that this rank computed by itself."""
    device = sums.counts_LE.device
    flags = torch.tensor([sums.tokens, signal, control_stop, save, limit], dtype=torch.float64).to(device)
    scalars = torch.stack([sums.loss_sum.double(), sums.aux.double(), sums.z.double(), sums.grad_squared.double()])
    pace_R = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    pace_R[dist.get_rank()] = own_s  # a place for each rank: the sum is the list of all
    vector = torch.cat((flags, scalars, sums.counts_LE.double().flatten(), pace_R.to(device)))
    dist.all_reduce(vector)
    vector = vector.cpu()
    counts = sums.counts_LE.numel()
    tokens, signals, stops, saves, limits, loss_sum, aux, z, grad_squared = vector[:9].tolist()
    return Agreed(
        loss=loss_sum / tokens,
        tokens=int(tokens),
        aux=aux,
        z=z,
        grad_norm=grad_squared**0.5,
        counts_LE=vector[9 : 9 + counts].view(sums.counts_LE.shape),
        signal=signals > 0,
        control_stop=stops > 0,
        save=saves > 0,
        limit=limits > 0,
        own_s=tuple(vector[9 + counts :].tolist()),
    )


def reduce_evaluation(loss_sum: torch.Tensor, tokens: int, asked: Asked) -> AgreedEvaluation:
    """All-reduce over the world of one batch's sums; one host sync."""
    flags = torch.tensor([tokens, asked.signal, asked.control], dtype=torch.float64).to(loss_sum.device)
    vector = torch.cat((loss_sum.double().reshape(1), flags))
    dist.all_reduce(vector)
    total, count, signals, stops = vector.tolist()
    return AgreedEvaluation(total, int(count), _source(signals > 0, stops > 0))


def agree_on_stop(asked: Asked, device: torch.device) -> Source | None:
    """Whether anyone was asked to stop. For start-up only: in training it rides in ``reduce_step``."""
    flags = torch.tensor([asked.signal, asked.control], dtype=torch.float64).to(device)
    dist.all_reduce(flags)
    signals, stops = flags.tolist()
    return _source(signals > 0, stops > 0)


def agree_to_pause(pause: bool, device: torch.device) -> bool:
    """Rank 0's word at a rung of the sweep, of which a run meets a handful in its life.

    A collective of its own: the step's own brings the loss that is judged.
    """
    flag = torch.tensor([pause], dtype=torch.float64).to(device)
    dist.all_reduce(flag)
    return bool(flag.item())
