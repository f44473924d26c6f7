"""The training loop: step, agree, update, save, leave. What a step means is here; files and lines are other modules' work.

Shapes: L MoE layers, E experts. All ranks take the same decisions from the same reduced figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hpcmoe.config.schema import Config
from hpcmoe.data.loader import Loader
from hpcmoe.engine.agreement import Agreed, StepSums, any_rank, reduce_step
from hpcmoe.engine.checkpoint import Checkpointer, Progress
from hpcmoe.engine.compute import Compute
from hpcmoe.engine.optimizer import clip_gradients
from hpcmoe.engine.peak import Peak
from hpcmoe.engine.report import Reporter, StepFigures
from hpcmoe.engine.schedule import learning_rate
from hpcmoe.engine.stages import Stages
from hpcmoe.engine.stop import ControlFiles, StopSignals
from hpcmoe.engine.support import Sizes
from hpcmoe.engine.verdict import Source, Word
from hpcmoe.errors import UserError
from hpcmoe.models.accounting import Convention, flops_per_token
from hpcmoe.runs.journal import Journal

CONVENTION: Convention = "titan"


@dataclass(frozen=True)
class Outcome:
    verdict: Word
    step: int
    source: Source | None = None


@dataclass
class Lead:
    """What only rank 0 has."""

    journal: Journal
    control: ControlFiles
    reporter: Reporter


@dataclass
class Trainer:
    config: Config
    sizes: Sizes
    attempt: str
    data_rank: int
    device: torch.device
    stages: Stages
    compute: Compute
    optimizer: torch.optim.Optimizer
    loader: Loader
    checkpointer: Checkpointer
    progress: Progress
    signals: StopSignals
    peak: Peak
    lead: Lead | None  # rank 0 only
    on_first_step: Callable[[int], None] = lambda step: None
    _honouring_save: bool = field(default=False, init=False)

    def run(self) -> Outcome:
        """Train to the last step, or until all ranks agree to leave. Returns when everything is durable."""
        steps = self.config.train.steps
        early = self._asked_before_training()
        if early is not None and self.progress.step < steps:
            return self._leave(early)
        self.stages.train()
        clock, first = time.monotonic(), True
        while self.progress.step < steps:
            agreed = self.train_step()
            if self.lead is not None:
                clock = self._report(self.lead.reporter, agreed, clock)
            if first:
                self.on_first_step(self.progress.step)
                first = False
            if self.progress.step < steps and (agreed.control_stop or agreed.signal):
                return self._leave("control" if agreed.control_stop else "signal")
            self._maybe_save(agreed.control_save)
        begun = time.monotonic()
        self.checkpointer.save_durably(self.stages, self.optimizer, self.progress)
        if self.lead is not None:
            self.lead.control.save_done()
            self._journal_left("completed", time.monotonic() - begun)
        return Outcome("completed", self.progress.step)

    def train_step(self) -> Agreed:
        """One optimizer step over the global batch. Raises UserError if the loss or the gradient is not finite, on all ranks."""
        agreed = self._agree(self._forward_backward())
        step = self.progress.step + 1
        if not (math.isfinite(agreed.loss) and math.isfinite(agreed.grad_norm)):
            raise UserError(
                f"step {step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}: not finite; the last checkpoint is of step "
                f"{self.checkpointer.saved_step or 0}. Lower optim.lr (now {self.config.optim.lr}) or clip (optim.clip_norm)"
            )
        clip_gradients(self.stages.parameters(), agreed.grad_norm, self.config.optim.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config.train.steps, self.config.optim)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for layer, moe in self.stages.moe_layers().items():
            moe.router.update_balance(agreed.counts_LE[layer - self.config.model.first_dense_layers].to(self.device))
        self.progress.step = step
        self.progress.tokens += agreed.tokens
        self.progress.position += self.sizes.global_batch
        return agreed

    def _forward_backward(self) -> StepSums:
        """This rank's microbatches; gradients are those of the mean over the global batch's tokens."""
        sizes = self.sizes
        batches = self.loader.microbatches(
            self.progress.position, sizes.global_batch, self.data_rank, sizes.data_ranks, sizes.microbatch
        )
        return self.compute.train(list(batches), sizes.global_batch * self.config.train.seq_len)

    def _agree(self, sums: StepSums) -> Agreed:
        """Signals and control files are looked at here, once a step, as late as the reduction allows."""
        stop = save = notice = False
        if self.lead is not None:
            stop, notice = self.lead.control.stop_asked(), self.lead.control.noticed()
            save = not self._honouring_save and self.lead.control.save_asked()
        return reduce_step(sums, signal=bool(self.signals.heard) or notice, control_stop=stop, control_save=save)

    def _asked_before_training(self) -> Source | None:
        control = self.lead is not None and self.lead.control.stop_asked()
        if any_rank(control, self.device):
            return "control"
        notice = self.lead is not None and self.lead.control.noticed()
        return "signal" if any_rank(bool(self.signals.heard) or notice, self.device) else None

    def _maybe_save(self, asked: bool) -> None:
        interval, step = self.config.checkpoint.interval, self.progress.step
        self.checkpointer.poll()
        if self.lead is not None and self._honouring_save and not self.checkpointer.in_flight():
            self.lead.control.save_done()
            self._honouring_save = False
        if step < self.config.train.steps and (asked or (interval and step % interval == 0)):
            self.checkpointer.start(self.stages, self.optimizer, self.progress)
            self._honouring_save = self._honouring_save or asked

    def _leave(self, source: Source) -> Outcome:
        """Save unless nothing is new, and only then say so."""
        if self.lead is not None:
            self.lead.journal.append("stop_requested", step=self.progress.step, source=source)
            print(f"asked to stop by {source}: saving step {self.progress.step}", flush=True)
        begun = time.monotonic()
        if self.progress.step > 0:
            self.checkpointer.save_durably(self.stages, self.optimizer, self.progress)
        verdict: Word = "stopped" if source == "control" else "leave"
        if self.lead is not None:
            self._journal_left(verdict, time.monotonic() - begun)
        return Outcome(verdict, self.progress.step, source)

    def _journal_left(self, verdict: Word, seconds: float) -> None:
        assert self.lead is not None
        self.lead.journal.append("left", step=self.progress.step, verdict=verdict, save_s=round(seconds, 4))

    def _report(self, reporter: Reporter, agreed: Agreed, clock: float) -> float:
        now = time.monotonic()
        seconds = now - clock
        rate = agreed.tokens / seconds
        flops = flops_per_token(self.config.model, self.config.train.seq_len, CONVENTION) * rate
        layers, _ = agreed.counts_LE.shape
        balance = (agreed.counts_LE.amax(-1) / agreed.counts_LE.mean(-1)).max().item() if layers else 1.0
        reporter.step(
            StepFigures(
                step=self.progress.step,
                loss=agreed.loss,
                tokens=self.progress.tokens,
                grad_norm=agreed.grad_norm,
                lr=self.optimizer.param_groups[0]["lr"],
                tokens_per_s=rate,
                mfu=None if self.peak.tflops is None else flops / (self.peak.tflops * 1e12),
                flops_convention=CONVENTION,
                peak_tflops=self.peak.tflops,
                precision=self.peak.precision,
                aux_loss=agreed.aux / max(1, layers),
                z_loss=agreed.z / max(1, layers),
                expert_max_over_mean=balance,
                seconds=seconds,
                attempt=self.attempt,
                t=time.time(),
            )
        )
        return now
