"""Checking ``sweep.halving``: rungs that a run meets, at which there is something to compare. Pure."""

from __future__ import annotations

from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError


def check_halving(config: Config) -> None:
    """Raises UserError. Names and signs are checked with those of all other keys."""
    halving, steps = config.sweep.halving, config.train.steps
    first, interval = halving.first_rung, config.evaluation.interval
    if first is None:
        return
    if config.runs_command:
        raise UserError(
            f"sweep.halving.first_rung={first}: the steps and checkpoints of engine=command are not hpcmoe's to stop at"
        )
    if halving.eta < 2:
        raise UserError(f"sweep.halving.eta={halving.eta} must be 2 or more: the best 1/eta of a rung go on")
    if first >= steps:
        raise UserError(f"sweep.halving.first_rung={first} must be below train.steps={steps}, where a run is done anyway")
    if halving.metric == "eval_loss" and (not interval or first % interval):
        every = f"evaluation.interval={interval}" + ("" if interval else " (no evaluation)")
        raise UserError(
            f"sweep.halving.metric=eval_loss needs an evaluation at every rung: {every} must divide "
            f"sweep.halving.first_rung={first}"
        )
