"""The training loop: step, agree, update, save, leave. What a step means is here; files, lines and features are others' work.

Shapes: L MoE layers, E experts. All ranks take the same decisions from the same reduced figures.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from hpcmoe.config.schema import Config
from hpcmoe.data.loader import Loader
from hpcmoe.engine.agreement import Agreed, StepSums, agree_on_stop, reduce_step
from hpcmoe.engine.callbacks.callback import NOTHING, Callback, Evaluated, Phase, Told
from hpcmoe.engine.checkpoint import Checkpointer, Progress
from hpcmoe.engine.compute import Compute
from hpcmoe.engine.interval import SavePlan
from hpcmoe.engine.optimizer import clip_gradients
from hpcmoe.engine.pace import Pace
from hpcmoe.engine.peak import Peak
from hpcmoe.engine.report import Reporter, figures_of
from hpcmoe.engine.schedule import batch_tokens, learning_rate
from hpcmoe.engine.stages import Stages
from hpcmoe.engine.stop import ControlFiles, StopSignals, asked_to_stop
from hpcmoe.engine.support import Sizes
from hpcmoe.engine.verdict import Source, Word
from hpcmoe.errors import UserError
from hpcmoe.runs.journal import Journal

STAYS = ("control", "rung")  # who asks for an end after which the run does not come back by itself


@dataclass(frozen=True)
class Outcome:
    verdict: Word
    step: int
    source: Source | None = None
    reason: str | None = None  # why it was asked to stop, where that needs words; what went wrong while leaving


@dataclass
class Lead:
    """What only rank 0 has."""

    journal: Journal
    control: ControlFiles
    reporter: Reporter
    plan: SavePlan


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
    pace: Pace | None = None
    on_first_step: Callable[[int], None] = lambda step: None
    callbacks: Sequence[Callback] = ()
    _save_asked: bool = field(default=False, init=False)  # by control/save, at the newest step; rank 0's
    _honouring_save: bool = field(default=False, init=False)  # its save has begun; the file stays until one succeeds; rank 0's
    _skipped: str | None = field(default=None, init=False)  # why the newest step was not taken
    _clock: float = field(default=0.0, init=False)  # when the running step began

    def run(self) -> Outcome:
        """Train to the last step, or until all ranks agree to leave. Returns when everything is durable."""
        steps = self.config.train.steps
        self._restore_callbacks()
        if self.progress.step < steps:
            heard = self._asked_before_training()
            if heard.stop is not None:
                return self._leave(heard.stop, heard.why)
        self.stages.train()
        self._clock, first = time.monotonic(), True
        while self.progress.step < steps:
            agreed = self.train_step()
            seconds = time.monotonic() - self._clock
            self._clock += seconds
            if self.lead is not None:
                self.lead.plan.done(seconds)
            if first:
                self.on_first_step(self.progress.step)
                first = False
            heard = self._report_and_hear(agreed, seconds)
            if self.progress.step < steps and heard.stop is not None:
                return self._leave(heard.stop, heard.why)
            self._maybe_save(agreed.save or heard.save)
        return self._leave(None)

    def train_step(self) -> Agreed:
        """One optimizer step over the global batch, or none where all ranks see a reason to skip it.

        Raises UserError, on all ranks, if too many are skipped, or if one must be and no callback is there to decide it.
        """
        step = self.progress.step + 1
        for callback in self.callbacks:
            callback.before_step(step)
        sequences = batch_tokens(self.progress.tokens, self.config.train) // self.config.train.seq_len
        agreed = self._agree(step, self._forward_backward(step, sequences))
        self._skipped = self._reason_to_skip(step, agreed)
        if self._skipped is None:
            self._update(step, agreed)
        else:
            self.progress.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step = step
        self.progress.tokens += agreed.tokens
        self.progress.position += sequences
        return agreed

    def _forward_backward(self, step: int, sequences: int) -> StepSums:
        """This rank's microbatches of a batch of ``sequences``; gradients are those of the mean over its tokens."""
        sizes = self.sizes
        self._entering(step, "data")
        batches = self.loader.microbatches(self.progress.position, sequences, self.data_rank, sizes.data_ranks, sizes.microbatch)
        here = list(batches)
        self._entering(step, "compute")
        return self.compute.train(here, sequences * self.config.train.seq_len)

    def _agree(self, step: int, sums: StepSums) -> Agreed:
        """Signals, control files and the plan are looked at here, once a step, as late as the reduction allows."""
        self._entering(step, "agree")
        asked = asked_to_stop(self.signals, self._control())
        save = limit = False
        if self.lead is not None:
            asked_save = self.lead.control.save_asked()
            self._honouring_save = self._honouring_save and asked_save
            self._save_asked = asked_save and not self._honouring_save
            save = self._save_asked or self.lead.plan.due(step)
            limit = self.lead.plan.leaving()
        own_s = self.pace.take() if self.pace is not None else 0.0
        return reduce_step(sums, signal=asked.signal, control_stop=asked.control, save=save, limit=limit, own_s=own_s)

    def _reason_to_skip(self, step: int, agreed: Agreed) -> str | None:
        """The first reason that a callback has. What is not finite never gets into the weights, whoever is there."""
        for callback in self.callbacks:
            reason = callback.reason_to_skip(step, agreed)
            if reason is not None:
                return reason
        if not (math.isfinite(agreed.loss) and math.isfinite(agreed.grad_norm)):
            raise UserError(f"step {step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}: not finite")
        return None

    def _update(self, step: int, agreed: Agreed) -> None:
        self._entering(step, "update")
        clip_gradients(self.stages.parameters(), agreed.grad_norm, self.config.optim.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config.train.steps, self.config.optim)
        self.optimizer.step()
        for layer, moe in self.stages.moe_layers().items():
            moe.router.update_balance(agreed.counts_LE[layer - self.config.model.first_dense_layers].to(self.device))

    def _control(self) -> ControlFiles | None:
        return self.lead.control if self.lead is not None else None

    def _entering(self, step: int, phase: Phase) -> None:
        for callback in self.callbacks:
            callback.entering(step, phase)

    def _asked_before_training(self) -> Told:
        stop = agree_on_stop(asked_to_stop(self.signals, self._control()), self.device)
        if stop is not None:
            return Told(stop)
        return self._hear(callback.before_training(self.progress.step) for callback in self.callbacks)

    def _report_and_hear(self, agreed: Agreed, seconds: float) -> Told:
        """Tell of the step, let the callbacks do what is due, then write its line. What there is to do next."""
        step, lead = self.progress.step, self.lead
        if lead is not None:
            figures = figures_of(self.config, self.peak, self.attempt, self.progress, agreed, seconds, self._skipped)
            lead.reporter.tell(figures)
        heard = self._hear(callback.after_step(step, agreed, self._skipped) for callback in self.callbacks)
        if lead is not None:
            lead.reporter.write(figures)
        return heard if agreed.stop is None else Told(agreed.stop)

    def _hear(self, told: Iterable[Told]) -> Told:
        """Pass on what a callback has found before the next one is called; the first stop request that one of them made."""
        heard = NOTHING
        for one in told:
            heard = Told(heard.stop or one.stop, save=heard.save or one.save, why=heard.why if heard.stop else one.why)
            if one.evaluated is not None:
                self._pass_on(one.evaluated)
        return heard

    def _pass_on(self, result: Evaluated) -> None:
        for callback in self.callbacks:
            callback.evaluated(result)
        if self.lead is not None:
            self.lead.reporter.evaluation(result)
        self._clock += result.seconds  # no step's time

    def _restore_callbacks(self) -> None:
        states = json.loads(self.progress.callbacks)
        for callback in self.callbacks:
            if callback.name in states:
                callback.restore(states[callback.name])

    def _snapshot(self) -> Progress:
        """How far training is, with what the callbacks must know to go on from here."""
        states = {callback.name: callback.state() for callback in self.callbacks}
        self.progress.callbacks = json.dumps({name: state for name, state in states.items() if state is not None})
        return self.progress

    def _maybe_save(self, wanted: bool) -> None:
        """``wanted``: by rank 0, which said so in the step's reduction."""
        step = self.progress.step
        self.checkpointer.poll()
        if self._honouring_save and not self.checkpointer.in_flight() and not self.checkpointer.failed_in_a_row:
            assert self.lead is not None
            self.lead.control.save_done()
            self._honouring_save = False
        if wanted and step < self.config.train.steps:
            self._entering(step, "save")
            self.checkpointer.start(self.stages, self.optimizer, self._snapshot())
            if self.lead is not None:
                self.lead.plan.started(step)
                self._honouring_save = self._honouring_save or self._save_asked

    def _leave(self, source: Source | None, why: str | None = None) -> Outcome:
        """Save unless nothing is new, and only then say so. ``source``: who asked to stop; None: training is complete.

        Where the save fails the run leaves with the checkpoint it has. Training that is complete is not: it raises OSError.
        """
        step = self.progress.step
        if self.lead is not None and source is not None:
            self.lead.journal.append("stop_requested", step=step, source=source)
            print(f"{why or f'asked to stop by {source}'}: saving step {step}", flush=True)
        for callback in self.callbacks:
            callback.before_leaving(step, source)
        self._entering(step, "save")
        begun = time.monotonic()
        failure = self.checkpointer.save_durably(self.stages, self.optimizer, self._snapshot()) if step > 0 else None
        if failure is not None and source is None:
            raise OSError(f"all {step} steps are done, but the last checkpoint cannot be written: {failure}")
        saved = step if failure is None else self.checkpointer.saved_step or 0
        if failure is not None:
            failure = f"step {step} could not be saved ({failure}); the run continues after step {saved}"
        reason = "; ".join(words for words in (why, failure) if words) or None
        verdict: Word = "completed" if source is None else "stopped" if source in STAYS else "leave"
        if self.lead is not None:
            if source is None:
                self.lead.control.save_done()
            took = round(time.monotonic() - begun, 4)
            self.lead.journal.append("left", step=step, saved_step=saved, verdict=verdict, save_s=took)
        for callback in self.callbacks:
            callback.close()
        return Outcome(verdict, saved, source, reason)
