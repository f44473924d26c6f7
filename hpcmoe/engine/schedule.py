"""What follows from how far training is: the learning rate, by step; the batch's size, by tokens. Nothing else to save."""

from __future__ import annotations

import math

from hpcmoe.config.schema import OptimConfig, TrainConfig


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """Rate of update ``step`` (1 .. steps): linear warm-up, then cosine | wsd (stable, linear decay) | constant.

    It ends at lr * min_lr_ratio (constant: at lr), unless the warm-up takes all steps, and it makes no jump: of a decay that
    would begin inside the warm-up only the part behind it remains.
    """
    if step <= optim.warmup_steps:
        return optim.lr * (step / optim.warmup_steps)
    low = optim.lr * optim.min_lr_ratio
    after_warmup = max(1, steps - optim.warmup_steps)
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "wsd":
        decay = min(optim.decay_steps if optim.decay_steps is not None else max(1, steps // 10), after_warmup)
        done = min(1.0, max(0.0, step - (steps - decay)) / decay)
        return (1 - done) * optim.lr + done * low
    done = min(1.0, (step - optim.warmup_steps) / after_warmup)
    return low + (optim.lr - low) * (1 + math.cos(math.pi * done)) / 2


def batch_stairs(train: TrainConfig) -> list[int]:
    """Every size that the global batch has, in tokens, from the first steps' to train.global_batch_tokens."""
    whole, start = train.global_batch_tokens, train.batch_warmup.start_tokens
    if start is None:
        return [whole]
    return [*range(start, whole, train.batch_warmup.increment_tokens or start), whole]


def batch_tokens(trained: int, train: TrainConfig) -> int:
    """Tokens of the step that begins after ``trained`` tokens. Each stair lasts for as many tokens, whatever the layout."""
    stairs, until = batch_stairs(train), train.batch_warmup.tokens
    if trained >= until or len(stairs) == 1:
        return stairs[-1]
    return stairs[trained * (len(stairs) - 1) // until]
