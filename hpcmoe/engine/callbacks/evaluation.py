"""Loss on the held-out sequences, at intervals. Changes no weights, no random state and no data position.

A stop request is heard after each batch; an evaluation that was cut short is done again when the run comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from hpcmoe.config.schema import EvaluationConfig
from hpcmoe.data.loader import Loader
from hpcmoe.engine.agreement import Agreed, reduce_evaluation
from hpcmoe.engine.callbacks.callback import NOTHING, Callback, Evaluated, Phase, Told
from hpcmoe.engine.compute import Compute
from hpcmoe.engine.stop import ControlFiles, StopSignals, asked_to_stop
from hpcmoe.engine.support import Sizes


@dataclass
class Evaluation(Callback):
    """Each batch is as large as a training step's whole batch: what fits the pipeline's schedule there fits here."""

    name: ClassVar[str] = "evaluation"

    config: EvaluationConfig
    steps: int
    compute: Compute
    loader: Loader
    sizes: Sizes
    data_rank: int
    device: torch.device
    signals: StopSignals
    control: ControlFiles | None  # rank 0's
    tell_phase: Callable[[int, Phase], None] = lambda step, phase: None  # before each batch
    done: int = field(default=0, init=False)  # the last step after which the model was evaluated

    def state(self) -> dict[str, int]:
        return {"done": self.done}

    def restore(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def before_training(self, step: int) -> Told:
        return self._evaluate(step) if self._due(step) and step < self.steps else NOTHING

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        return self._evaluate(step) if self._due(step) and agreed.stop is None else NOTHING

    def _due(self, step: int) -> bool:
        return step > self.done and (step % self.config.interval == 0 or step == self.steps)

    def _evaluate(self, step: int) -> Told:
        begun = time.monotonic()
        loss, tokens, stop = 0.0, 0, None
        sizes, last = self.sizes, self.config.batches - 1
        for number in range(self.config.batches):
            self.tell_phase(step, "evaluate")
            batches = self.loader.held_out_microbatches(
                number * sizes.global_batch, sizes.global_batch, self.data_rank, sizes.data_ranks, sizes.microbatch
            )
            loss_sum, here = self.compute.evaluate(list(batches))
            agreed = reduce_evaluation(loss_sum, here, asked_to_stop(self.signals, self.control))
            stop = agreed.stop
            if stop is not None and number < last:
                return Told(stop)
            loss += agreed.loss_sum
            tokens += agreed.tokens
        self.done = step
        return Told(stop, Evaluated(step, loss / tokens, tokens, time.monotonic() - begun))
