"""A rank that computes more slowly than the others, again and again, is named with its node. Rank 0's; slows nobody.

What is measured: hpcmoe.engine.pace. What follows for the node: hpcmoe.runs.nodes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.callback import NOTHING, Callback, Told
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.nodes import STRAGGLER

WINDOW_STEPS, WINDOW_S = 20, 30.0  # at least; of one window the median counts
WINDOWS = 3  # in a row
# Times as long as the others' median. CPU ranks share their cores with whoever else is there.
SLOW = {"cuda": 1.25, "cpu": 2.0}


class Straggler(Callback):
    """``nodes``: each rank's; ``stages``: of the pipeline, whose ranks are consecutive. Ranks are compared within a stage: what
    its first block waits for is not what another stage's waits for.
    """

    name = "straggler"

    def __init__(
        self,
        journal: Journal,
        nodes: Sequence[str],
        device: str,
        stages: int = 1,
        window_s: float = WINDOW_S,
        window_steps: int = WINDOW_STEPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.journal, self.nodes, self.slow, self.stages = journal, nodes, SLOW[device], stages
        self.window_s, self.window_steps, self.clock = window_s, window_steps, clock
        self._steps: list[Sequence[float]] = []
        self._since = clock()
        self._warm = False
        self._in_a_row: dict[int, int] = {}
        self._told: set[int] = set()

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        if not self._warm:  # kernels are chosen, memory is made
            self._warm, self._since = True, self.clock()
            return NOTHING
        self._steps.append(agreed.own_s)
        if len(self._steps) >= self.window_steps and self.clock() - self._since >= self.window_s:
            self._judge(step, [statistics.median(seconds) for seconds in zip(*self._steps, strict=True)])
            self._steps, self._since = [], self.clock()
        return NOTHING

    def _judge(self, step: int, medians: Sequence[float]) -> None:
        size = len(medians) // self.stages
        found: dict[int, float] = {}
        for first in range(0, len(medians), size):
            found |= {first + rank: others_s for rank, others_s in stragglers(medians[first : first + size], self.slow).items()}
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in found}
        for rank, others_s in found.items():
            if self._in_a_row[rank] < WINDOWS or rank in self._told:
                continue
            self._told.add(rank)
            own_s, node = medians[rank], self.nodes[rank]
            times = round(own_s / others_s, 2)
            self.journal.append(
                STRAGGLER, rank=rank, node=node, step=step, times=times, own_s=round(own_s, 6), others_s=round(others_s, 6)
            )
            print(
                f"STRAGGLER: rank {rank} on {node} computes {times:g} times as long as the others, "
                f"in {WINDOWS} windows of {self.window_steps} steps or more",
                file=sys.stderr,
                flush=True,
            )


def stragglers(medians: Sequence[float], slow: float) -> dict[int, float]:
    """The ranks that took ``slow`` times as long as the median of the others, each with that median."""
    found: dict[int, float] = {}
    for rank, own in enumerate(medians):
        others = sorted([*medians[:rank], *medians[rank + 1 :]])
        if others and own > slow * (median := others[len(others) // 2]) and median > 0:
            found[rank] = median
    return found
