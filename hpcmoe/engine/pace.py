"""How long this rank computes by itself in a step: the attention of its first block, between two collectives.

Ranks wait for each other in every block, so that whole steps last equally long on all of them; who holds up the others shows only
in a part that nobody waits in. Attention has the same shape on every rank, whatever the layout and the routing. Seconds are those
of one call: wall time on a CPU, the device's own on a GPU. No collective and no synchronization is added.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpcmoe.engine.stages import Stages
from hpcmoe.models.transformer import Block


class Pace:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds, self._calls = 0.0, 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def watch(self, stages: Stages) -> None:
        """Time the first block that lives here from now on."""
        block = next(iter(stages.parts[0].layers.values()))
        assert isinstance(block, Block)
        block.attention.clock = self.span

    @contextmanager
    def span(self) -> Iterator[None]:
        if self._device.type != "cuda":
            begun = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - begun
                self._calls += 1
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        try:
            yield
        finally:
            last.record()
            self._events.append((first, last))

    def take(self) -> float:
        """The mean since this was last asked, of what the device has done: on a GPU that may be the step before this one."""
        done = [pair for pair in self._events if pair[1].query()]
        self._events = self._events[len(done) :]
        seconds = self._seconds + sum(first.elapsed_time(last) for first, last in done) / 1e3
        calls = self._calls + len(done)
        self._seconds, self._calls = 0.0, 0
        return seconds / max(1, calls)
