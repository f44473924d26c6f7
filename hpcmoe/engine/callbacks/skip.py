"""Steps that are not taken: loss or gradient norm not finite, or far above the recent ones. Too many of them end the run.

Decided from reduced figures, hence alike on all ranks; the figures it remembers are part of the checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from hpcmoe.config.schema import SkipConfig
from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.callback import NOTHING, Callback, Told
from hpcmoe.errors import UserError
from hpcmoe.runs.journal import Journal


class SkipStep(Callback):
    """``journal``: rank 0's. ``saved_step``: of the newest checkpoint; ``lr``: optim.lr; both for the error's line only."""

    name = "skip"

    def __init__(self, config: SkipConfig, journal: Journal | None, saved_step: Callable[[], int | None], lr: float) -> None:
        self.config, self.journal, self.saved_step, self.lr = config, journal, saved_step, lr
        self.losses: deque[float] = deque(maxlen=config.window)  # of the recent steps that were taken
        self.norms: deque[float] = deque(maxlen=config.window)
        self.skipped: list[int] = []  # steps, within the window
        self.in_a_row = 0

    def state(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self.config.window)
        self.norms = deque(state["norms"], maxlen=self.config.window)
        self.skipped = list(state["skipped"])
        self.in_a_row = state["in_a_row"]

    def reason_to_skip(self, step: int, agreed: Agreed) -> str | None:
        """Raises UserError, on all ranks, where one skipped step more would be one too many."""
        reason = self._reason(agreed)
        if reason is None:
            return None
        recent = [earlier for earlier in self.skipped if earlier > step - self.config.window]
        if self.in_a_row >= self.config.most_in_a_row or len(recent) >= self.config.most_in_window:
            raise UserError(
                f"step {step}: loss {agreed.loss:.6g}, gradient norm {agreed.grad_norm:.6g}: {reason}; the last checkpoint is of "
                f"step {self.saved_step() or 0}. Skipped before it: {self.in_a_row} steps in a row, {len(recent)} of the last "
                f"{self.config.window} (train.skip). Lower optim.lr (now {self.lr:g}) or clip (optim.clip_norm)"
            )
        return reason

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        self.skipped = [earlier for earlier in self.skipped if earlier > step - self.config.window]
        if skipped is None:
            self.in_a_row = 0
            self.losses.append(agreed.loss)
            self.norms.append(agreed.grad_norm)
            return NOTHING
        self.in_a_row += 1
        self.skipped.append(step)
        if self.journal is not None:
            self.journal.append(
                "step_skipped", step=step, loss=finite(agreed.loss), grad_norm=finite(agreed.grad_norm), reason=skipped
            )
        return NOTHING

    def _reason(self, agreed: Agreed) -> str | None:
        if not (math.isfinite(agreed.loss) and math.isfinite(agreed.grad_norm)):
            return "not finite"
        if not self.config.spike_sigma or len(self.losses) < max(2, self.config.window // 2):
            return None
        for what, value, recent in (("loss", agreed.loss, self.losses), ("gradient norm", agreed.grad_norm, self.norms)):
            limit = spike_limit(list(recent), self.config.spike_sigma)
            if value > limit:
                return f"{what} above {limit:.6g}, the recent steps' mean and {self.config.spike_sigma:g} deviations"
        return None


def spike_limit(values: list[float], sigma: float) -> float:
    """Mean plus ``sigma`` standard deviations. Summed exactly, so that a restored window gives the same bits."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return mean + sigma * math.sqrt(variance)


def finite(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None
