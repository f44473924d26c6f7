"""Pipeline schedules: how long a rank waits in a step, and how many microbatches' activations it holds at once.

Not the time of a microbatch (step.py). Sources: Narayanan et al. 2021 (1F1B, interleaved), Lamy-Poirier 2022 (breadth-first),
Qi et al. 2023 (zero bubble, ZB-V), DeepSeek-V3 report (DualPipe); tests hold the formulas to the orders that PyTorch runs.
"""

from __future__ import annotations

from hpcmoe.models.partition import SPLIT_BACKWARD, V_SHAPED
from hpcmoe.planner.layout import Layout


def bubble_s(layout: Layout, forward: float, backward_input: float, backward_weight: float) -> float:
    """Idle seconds of a rank in one step. The arguments are seconds of one microbatch on the slowest rank, all its chunks.

    Schedules that split the backward pass fill the wait with weight gradients as far as these go.
    """
    wait = (layout.pp - 1) / layout.vstages
    if layout.schedule in SPLIT_BACKWARD:
        return wait * max(0.0, forward + backward_input - backward_weight)
    return wait * (forward + backward_input + backward_weight)


def in_flight_by_chunk(layout: Layout, microbatches: int, rank: int) -> tuple[float, ...]:
    """Microbatches whose activations each of the rank's chunks holds at the rank's peak."""
    pp, m = layout.pp, microbatches
    if pp == 1:
        return (1.0,)
    if layout.schedule == "1F1B":
        return (float(min(m, pp - rank)),)
    if layout.schedule == "GPipe":
        return (float(m),)
    if layout.schedule == "LoopedBFS":
        return (float(m),) * layout.vstages
    if layout.schedule in V_SHAPED:
        down = 2 * pp - 1 - rank + (1 if layout.schedule == "DualPipeV" else 0)
        return float(min(m, down)), float(min(m, rank + 1))
    per_round = m // max(1, m // pp)
    if layout.schedule == "InterleavedZeroBubble":
        return float(per_round), float(min(per_round, pp))
    if layout.schedule == "Interleaved1F1B":
        # Korthikanti et al. 2022, section 4.2.3
        warmup = 2 * (pp - rank - 1) + (layout.vstages - 1) * per_round + 1
        total = min(layout.vstages * m, warmup)
        if layout.vstages != 2:
            return (total / layout.vstages,) * layout.vstages
        late = min(per_round, total - per_round)
        return float(total - late), float(late)
    raise AssertionError(layout.schedule)


def in_flight(layout: Layout, microbatches: int, rank: int) -> float:
    """The same in microbatches through all of the rank's layers; a share below one counts part of them."""
    held = in_flight_by_chunk(layout, microbatches, rank)
    return sum(held) / len(held)
