"""Early stopping at the rungs of a sweep: the run's figure is told to the others, and rank 0 says whether it goes on.

Who goes on is decided in hpcmoe.runs.halving. A run that pauses is saved at the rung's step and continues there when it is
promoted; the learning rate follows train.steps and knows nothing of it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcmoe.config.schema import HalvingConfig
from hpcmoe.engine.agreement import Agreed, agree_to_pause
from hpcmoe.engine.callbacks.callback import NOTHING, Callback, Evaluated, Told
from hpcmoe.runs.halving import Mode, Reached, place_of, rung_steps
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.rungs import read_rungs, with_told, write_rung


@dataclass
class Judge:
    """Rank 0's part: adds the run's figure to the sweep's, and compares."""

    sweep_dir: Path
    run_id: str
    attempt: str
    journal: Journal
    eta: int
    mode: Mode
    passed: frozenset[int]  # rungs at which the run has been told to go on

    def reason_to_pause(self, rung: int, step: int, value: float | None) -> str | None:
        if rung in self.passed:
            return None
        own = Reached(self.run_id, rung, step, value)
        place = place_of(self._told(own), self.run_id, rung, self.eta, self.mode)
        said = place.words(self.eta)
        self.journal.append(
            "rung", rung=rung, step=step, value=value, place=place.rank, of=place.of, goes_on=place.goes_on, reason=said
        )
        print(f"rung {rung} (step {step}): {said}", flush=True)
        return None if place.goes_on else f"paused at rung {rung} (step {step}): {said}"

    def _told(self, own: Reached) -> list[Reached]:
        """What is known of all, the run itself included. That the sweep's disk is full must not end the run."""
        try:
            return write_rung(self.sweep_dir, own, self.attempt)
        except OSError as error:
            print(f"{self.sweep_dir} does not take this run's figure: {error}", file=sys.stderr, flush=True)
        try:
            return with_told(read_rungs(self.sweep_dir), [own])
        except OSError:
            return [own]


class Halving(Callback):
    """``judge``: rank 0's. Comes after the evaluation, whose result it may need."""

    name = "halving"

    def __init__(self, config: HalvingConfig, steps: int, device: torch.device, judge: Judge | None) -> None:
        assert config.first_rung is not None
        self.metric, self.device, self.judge = config.metric, device, judge
        self.rungs = {step: number for number, step in enumerate(rung_steps(config.first_rung, config.eta, steps), 1)}
        self.step = 0  # after which the newest figure was taken
        self.value: float | None = None

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value}

    def restore(self, state: dict[str, Any]) -> None:
        self.step, self.value = state["step"], state["value"]

    def evaluated(self, result: Evaluated) -> None:
        if self.metric == "eval_loss":
            self._note(result.step, result.loss)

    def before_training(self, step: int) -> Told:
        """An attempt that was cut short between the rung's step and its verdict begins where the other ended."""
        return self._at(step)

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        if self.metric == "loss":
            self._note(step, agreed.loss)
        return self._at(step) if agreed.stop is None else NOTHING  # who leaves now is asked when it comes back

    def _note(self, step: int, value: float) -> None:
        self.step, self.value = step, value if math.isfinite(value) else None

    def _at(self, step: int) -> Told:
        """At a rung, once its figure is known: an evaluation that was cut short is done again before it is asked for."""
        rung = self.rungs.get(step)
        if rung is None or self.step != step:
            return NOTHING
        why = self.judge.reason_to_pause(rung, step, self.value) if self.judge is not None else None
        if agree_to_pause(why is not None, self.device):
            return Told("rung", why=why)
        return Told(save=True)
