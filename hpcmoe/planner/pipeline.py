"""Pipeline schedules: how much of the step is bubble, and how many microbatches' activations a rank holds at once.

Not the time of a microbatch (step.py). Sources: Narayanan et al. 2021 (1F1B, interleaved), Lamy-Poirier 2022 (breadth-first),
Qi et al. 2023 (zero bubble, ZB-V), DeepSeek-V3 report (DualPipe).
"""

from __future__ import annotations

from hpcmoe.planner.layout import Layout

ZERO_BUBBLE_SHARE = 1 / 3  # ZB-H1 leaves a third of 1F1B's bubble when a backward pass is twice a forward one


def bubble_microbatches(layout: Layout) -> float:
    """Idle time of a rank in one step, in units of one microbatch's forward and backward pass over the rank's layers."""
    wait = layout.pp - 1
    if layout.schedule in ("GPipe", "1F1B"):
        return float(wait)
    if layout.schedule in ("Interleaved1F1B", "LoopedBFS"):
        return wait / layout.vstages
    if layout.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        return wait * ZERO_BUBBLE_SHARE / layout.vstages
    raise AssertionError(layout.schedule)


def in_flight(layout: Layout, microbatches: int, stage: int) -> float:
    """Microbatches whose activations a rank holds at the peak; a share below one counts part of the rank's layers."""
    if layout.pp == 1:
        return 1.0
    if layout.schedule in ("GPipe", "LoopedBFS"):
        return float(microbatches)
    if layout.schedule == "1F1B":
        return float(min(microbatches, layout.pp - stage))
    if layout.schedule == "Interleaved1F1B":
        # Korthikanti et al. 2022, section 4.2.3: 1 + (p-1)/(p*m) over all layers; on rank 0 that is p times as many of its own
        warmup = 2 * (layout.pp - stage - 1) + (layout.vstages - 1) * layout.pp + 1
        return min(float(microbatches), warmup / layout.vstages)
    if layout.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        return float(min(microbatches, layout.pp + 1))  # no rank holds fewer: that is the price of the smaller bubble
    raise AssertionError(layout.schedule)
