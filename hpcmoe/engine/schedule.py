"""Learning rate as a function of the step. Nothing to save but the step itself."""

from __future__ import annotations

import math

from hpcmoe.config.schema import OptimConfig


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """Rate of update ``step`` (1 .. steps): linear warm-up, then cosine | wsd (stable, linear decay) | constant."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    low = optim.lr * optim.min_lr_ratio
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "wsd":
        decay = optim.decay_steps if optim.decay_steps is not None else max(1, steps // 10)
        done = max(0.0, step - (steps - decay)) / decay
        return optim.lr + (low - optim.lr) * min(1.0, done)
    done = min(1.0, (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
    return low + (optim.lr - low) * (1 + math.cos(math.pi * done)) / 2
