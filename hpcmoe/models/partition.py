"""Which layers each pipeline stage holds, balanced by FLOPs and then by parameters. Torch-free: planner and engine share it.

Not for what a stage costs in seconds or bytes under a layout (hpcmoe.planner) and not for running it (hpcmoe.engine.pipeline).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.errors import UserError
from hpcmoe.models.accounting import attention_matrices, attention_square
from hpcmoe.models.support import shared_width

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
CHUNKED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)  # weights' gradients are computed apart from inputs'
SCHEDULES = ("1F1B", "GPipe", *CHUNKED)
SLACK = 1.02  # a stage may take 2 % longer than it must, where that evens out the parameters


def chunks(schedule: str) -> int:
    """Model chunks (stages) on each pipeline rank."""
    return 2 if schedule in CHUNKED else 1


def stages_of_rank(schedule: str, pp: int, rank: int) -> list[int]:
    """The stages on pipeline rank ``rank``: round after round, or down and up again for the V-shaped schedules."""
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * chunk for chunk in range(chunks(schedule))]


def schedule_violation(schedule: str, pp: int, microbatches: int) -> str | None:
    """Why this many microbatches of a step cannot go through the schedule; None when they can. PyTorch's own conditions."""
    if pp == 1:
        return None
    least = chunks(schedule) * pp if schedule == "DualPipeV" else pp
    if microbatches < least and schedule in ("1F1B", *CHUNKED):
        return f"layout.schedule={schedule} with layout.pp={pp} needs at least {least} microbatches a step and has {microbatches}"
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, microbatches // pp)
        if microbatches % rounds:
            return f"layout.schedule={schedule} with layout.pp={pp} needs a multiple of {pp} microbatches and has {microbatches}"
    return None


def split(model: ModelConfig, seq_len: int, stages: int) -> list[range]:
    """Consecutive layers of each stage, at least one each.

    The most loaded stage has as few FLOPs as can be; within 2 % of that, the fullest has as few parameters as can be. The head
    counts on the last stage and the embedding, which has parameters and no FLOPs, on the first. What cannot be evened out
    leaves the earlier stages lighter: they keep more microbatches' activations.
    """
    if stages > model.layers:
        raise UserError(f"{stages} pipeline stages need at least as many layers, and model.layers={model.layers}")
    flops, sizes = zip(*(_layer_costs(model, layer, seq_len) for layer in range(model.layers)), strict=True)
    vocabulary = model.vocab_size * model.hidden
    return list(_split(flops, sizes, 2 * vocabulary, vocabulary, stages))


def _layer_costs(model: ModelConfig, layer: int, seq_len: int) -> tuple[int, int]:
    """(forward FLOPs a token with causal attention, parameters in matrices) of one layer."""
    attention = attention_matrices(model)
    if layer < model.first_dense_layers:
        active = held = 3 * model.hidden * model.ffn
    else:
        common = model.hidden * (model.experts + 3 * shared_width(model))
        active = common + model.top_k * 3 * model.hidden * model.expert_ffn
        held = common + model.experts * 3 * model.hidden * model.expert_ffn
    return 2 * (attention + active) + attention_square(model, seq_len) // 2, attention + held


@lru_cache(maxsize=4096)
def _split(flops: tuple[int, ...], sizes: tuple[int, ...], head_flops: int, ends: int, stages: int) -> tuple[range, ...]:
    """Least caps under which a greedy filling, last stage first, needs no more than ``stages`` stages."""

    def filled(cap_flops: float, cap_size: float) -> tuple[range, ...] | None:
        bounds, end = [len(flops)], len(flops)
        for stage in reversed(range(stages)):
            load = head_flops if stage == stages - 1 else 0
            size = (ends if stage == stages - 1 else 0) + (ends if stage == 0 else 0)
            begin = end
            while begin > stage and load + flops[begin - 1] <= cap_flops and size + sizes[begin - 1] <= cap_size:
                begin -= 1
                load += flops[begin]
                size += sizes[begin]
            if begin == end or (stage == 0 and begin > 0):
                return None
            bounds.append(begin)
            end = begin
        bounds.reverse()
        return tuple(range(a, b) for a, b in itertools.pairwise(bounds))

    cap_flops = _least(lambda cap: filled(cap, float("inf")) is not None, max(flops), sum(flops) + head_flops) * SLACK
    cap_size = _least(lambda cap: filled(cap_flops, cap) is not None, max(sizes), sum(sizes) + 2 * ends)
    found = filled(cap_flops, cap_size)
    assert found is not None
    return found


def _least(enough: Callable[[int], bool], low: int, high: int) -> int:
    """The least cap between ``low`` and ``high`` that is enough; ``high`` always is."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
