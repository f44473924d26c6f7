"""A step's forward and backward passes on this rank, with or without a pipeline. Not for deciding anything (the trainer does).

Gradients come out as those of the mean over the step's tokens. Shapes: L MoE layers of the whole model, E experts.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpcmoe.engine.agreement import StepSums
from hpcmoe.engine.optimizer import local_squared_norm
from hpcmoe.engine.stages import Stages
from hpcmoe.models.tensor_parallel import cross_entropy
from hpcmoe.models.transformer import Transformer

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, each int64 [B, S]


class LossSum:
    """Sum of the tokens' cross entropies, counted by one rank of those that compute it. fp64."""

    def __init__(self, part: Transformer, device: torch.device) -> None:
        self.tp = part.tp
        self.value = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The microbatch's loss, for backward."""
        loss = cross_entropy(logits, targets, self.tp)
        if self.tp.rank == 0:
            self.value += loss.detach()
            self.tokens += targets.numel()
        return loss


class Passes(Protocol):
    """How batches go through this rank's stages."""

    def train(self, batches: list[Batch], step_tokens: int, loss: LossSum) -> None:
        """Forward and backward; ``step_tokens``: the whole step's, over all ranks."""

    def evaluate(self, batches: list[Batch], loss: LossSum) -> None:
        """Forward only."""


class OneStage:
    """All layers on this rank: microbatches one after the other."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def train(self, batches: list[Batch], step_tokens: int, loss: LossSum) -> None:
        for inputs, targets in batches:
            self.model.loss_weight = inputs.numel() / step_tokens
            (loss.add(self.model(inputs), targets) / step_tokens).backward()

    def evaluate(self, batches: list[Batch], loss: LossSum) -> None:
        for inputs, targets in batches:
            loss.add(self.model(inputs), targets)


@torch.no_grad()
def sum_over_tp(stages: Stages) -> None:
    """Gradients of the parameters that all tp ranks hold whole (norms, routers, gates): each rank has a part. One all-reduce."""
    group = stages.parts[0].tp.group
    if group is None:
        return
    parts = [
        parameter.grad.to_local()
        for parameter in stages.parameters()
        if isinstance(parameter.grad, DTensor) and whole_on_tp(parameter.grad)
    ]
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    torch._foreach_copy_(
        parts, [new.view_as(part) for part, new in zip(parts, flat.split([p.numel() for p in parts]), strict=True)]
    )


def whole_on_tp(tensor: DTensor) -> bool:
    names = tensor.device_mesh.mesh_dim_names or ()
    return any(name == "tp" and placement.is_replicate() for name, placement in zip(names, tensor.placements, strict=True))


class Compute:
    """The passes of this rank and what they tell. ``moe_layers``: how many the whole model has."""

    def __init__(self, stages: Stages, passes: Passes, device: torch.device) -> None:
        self.stages, self.passes, self.device = stages, passes, device
        model = stages.parts[0].model
        self._experts, self._first_moe, self._layers = model.experts, model.first_dense_layers, model.layers

    def train(self, batches: list[Batch], step_tokens: int) -> StepSums:
        """Accumulates gradients over ``batches``, which are of one size on all ranks; this rank's share of the step's sums."""
        loss = LossSum(self.stages.parts[-1], self.device)
        self.passes.train([self._here(batch) for batch in batches], step_tokens, loss)
        sum_over_tp(self.stages)
        share = batches[0][0].numel() / step_tokens
        counts_LE = torch.zeros(self._layers - self._first_moe, self._experts, dtype=torch.int64, device=self.device)
        aux = z = torch.zeros((), device=self.device)
        for layer, loads in self.stages.drain_loads().items():
            counts_LE[layer - self._first_moe] = torch.stack([load.counts_E for load in loads]).sum(0)
            aux = aux + share * torch.stack([load.aux for load in loads]).sum()
            z = z + share * torch.stack([load.z for load in loads]).sum()
        return StepSums(
            loss_sum=loss.value,
            tokens=loss.tokens,
            aux=aux,
            z=z,
            grad_squared=local_squared_norm(self.stages.parameters(), self.device),
            counts_LE=counts_LE,
        )

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> tuple[torch.Tensor, int]:
        """(sum of the tokens' cross entropies, tokens) of this rank; as many batches as ``train`` takes."""
        loss = LossSum(self.stages.parts[-1], self.device)
        self.stages.train(False)
        self.passes.evaluate([self._here(batch) for batch in batches], loss)
        self.stages.train()
        for module in self.stages.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward pass does it
        return loss.value, loss.tokens

    def _here(self, batch: Batch) -> Batch:
        return batch[0].to(self.device, non_blocking=True), batch[1].to(self.device, non_blocking=True)
