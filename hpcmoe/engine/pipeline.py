"""Microbatches through a pipeline, by PyTorch's schedules. Which layers a stage holds: hpcmoe.models.partition.

Shapes: B sequences of a microbatch, S sequence, s = S / tp, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from hpcmoe.engine.compute import Batch, LossSum
from hpcmoe.engine.stages import Stages
from hpcmoe.models.transformer import Transformer

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class Stage(PipelineStage):
    """PyTorch's, which between two stages on one rank would hand on gradients that an evaluation does not have."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Pipeline:
    """This rank's stages under one schedule. Schedules are built per number and shape of microbatches and kept."""

    def __init__(self, stages: Stages, schedule: str, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        self.stages, self.schedule, self.group, self.dtype, self.device = stages, schedule, group, dtype, device
        self.first, self.last = stages.numbers[0] == 0, stages.count - 1 in stages.numbers
        self._built: dict[tuple[int, torch.Size], Schedule] = {}
        self._loss: LossSum | None = None
        self._step_tokens = 1

    def train(self, batches: list[Batch], step_tokens: int, loss: LossSum) -> None:
        self._run("step", batches, step_tokens, loss)

    def evaluate(self, batches: list[Batch], loss: LossSum) -> None:
        self._run("eval", batches, 1, loss)

    def _run(self, what: str, batches: list[Batch], step_tokens: int, loss: LossSum) -> None:
        shape = batches[0][0].shape
        key = (len(batches), shape)
        if key not in self._built:
            self._built[key] = self._build(len(batches), shape)
        self._loss, self._step_tokens = loss, step_tokens
        for part in self.stages.parts:
            part.loss_weight = shape.numel() / step_tokens
        inputs = (torch.cat([batch[0] for batch in batches]),) if self.first else ()
        targets = torch.cat([batch[1] for batch in batches]) if self.last else None
        run = getattr(self._built[key], what)
        run(*inputs, target=targets, losses=[] if self.last else None, return_outputs=False)

    def _mean_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """A microbatch's part of the mean over the step's tokens; what it adds to is the running step's."""
        assert self._loss is not None
        return self._loss.add(logits, targets) / self._step_tokens

    def _build(self, microbatches: int, shape: torch.Size) -> Schedule:
        chosen: Any = get_schedule_class(self.schedule)
        stages = [
            Stage(
                part,
                number,
                self.stages.count,
                self.device,
                input_args=self._passed_into(part, shape),
                output_args=self._passed_on(part, shape),
                group=self.group,
            )
            for part, number in zip(self.stages.parts, self.stages.numbers, strict=True)
        ]
        one_or_all = stages[0] if issubclass(chosen, PipelineScheduleSingle) else stages
        return chosen(one_or_all, microbatches, loss_fn=self._mean_loss, scale_grads=False)

    def _passed_into(self, part: Transformer, shape: torch.Size) -> torch.Tensor:
        if part.part.first:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return self._hidden(part, shape)

    def _passed_on(self, part: Transformer, shape: torch.Size) -> torch.Tensor:
        if part.part.last:
            width = part.model.vocab_size // part.tp.size
            return torch.empty(*shape, width, dtype=self.dtype, device="meta", requires_grad=True)
        return self._hidden(part, shape)

    def _hidden(self, part: Transformer, shape: torch.Size) -> torch.Tensor:
        size = (shape[0], shape[1] // part.tp.size, part.model.hidden)
        return torch.empty(size, dtype=self.dtype, device="meta", requires_grad=True)
