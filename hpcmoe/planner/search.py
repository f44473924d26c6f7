"""The choice: all layouts that the model, the mesh and the node allow, ranked by tokens/s among those that fit with margin.

Two passes: every PP x TP x EP x microbatch with the least recompute that fits, then replicas and schedules of the best.
Not the costs themselves (step.py, memory.py) and not the words (explain.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcmoe.models.partition import SPLIT_BACKWARD, schedule_violation
from hpcmoe.planner.constants import BYTES_RESERVED, MARGIN
from hpcmoe.planner.layout import PLACEMENTS, RECOMPUTE, Layout, stage_chunks, violations
from hpcmoe.planner.machine import Machine
from hpcmoe.planner.memory import Memories, Memory
from hpcmoe.planner.shapes import Shape
from hpcmoe.planner.step import Costs, StepTime
from hpcmoe.planner.workload import Workload

MAX_PP = 32
MICROBATCHES = (1, 2, 4, 8, 16)
REFINED = 16  # layouts whose replicas and schedules the second pass tries
# GPipe and LoopedBFS wait as long as 1F1B and Interleaved1F1B and keep more: costed when asked for
SEARCHED_SCHEDULES = ("1F1B", "Interleaved1F1B", *SPLIT_BACKWARD)
KEPT = 40


@dataclass(frozen=True)
class Pins:
    """What the user fixed; None: free."""

    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    ep: int | None = None
    schedule: str | None = None
    microbatch: int | None = None
    recompute: str | None = None
    ep_placement: str | None = None

    def names(self) -> list[str]:
        return [name for name, value in self.__dict__.items() if value is not None]


@dataclass(frozen=True)
class Candidate:
    """A layout with what follows from it. ``step`` None: the machine's speeds are not known."""

    layout: Layout
    memory: Memory
    fits: bool
    step: StepTime | None
    tokens_per_s: float | None  # per GPU


def limit_bytes(machine: Machine) -> float | None:
    """What a process may allocate on one GPU: the card, less the CUDA context and NCCL's buffers. None: not known."""
    return None if machine.mem_bytes is None else machine.mem_bytes - (0.0 if machine.cpu else BYTES_RESERVED)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class Search:
    """One model and workload on one machine with a number of nodes."""

    def __init__(self, shape: Shape, work: Workload, machine: Machine, nodes: int, pins: Pins | None = None) -> None:
        self.shape, self.work, self.machine, self.nodes = shape, work, machine, nodes
        self.world = nodes * machine.gpus_per_node
        self.pins = pins or Pins()
        self.limit = limit_bytes(machine)
        self.costs = Costs(shape, work, machine) if machine.known else None
        self.memories = self.costs.memories if self.costs else Memories(shape, work)
        self.examined = 0

    def _fits(self, memory: Memory) -> bool:
        return self.limit is None or memory.total <= self.limit * (1 - MARGIN)

    def microbatches(self, layout: Layout) -> int | None:
        """Microbatches in a step; None when the batch does not divide or the schedule needs more."""
        each = layout.dp * layout.microbatch
        if self.work.batch % each:
            return None
        count = self.work.batch // each
        return None if schedule_violation(layout.schedule, layout.pp, count) else count

    def candidate(self, layout: Layout, memory: Memory | None = None) -> Candidate:
        """Costs of one layout; how fast it would be is asked only of those that fit. ``memory``: if it is known already."""
        self.examined += 1
        if memory is None:
            memory = self.memories.fullest(layout, max(1, self.work.batch // (layout.dp * layout.microbatch)))
        fits = self._fits(memory)
        step = self.costs.step(layout) if self.costs and fits else None
        speed = None if step is None else self.work.batch * self.work.seq / step.total / layout.world
        return Candidate(layout, memory, fits, step, speed)

    def _least_recompute(self, layout: Layout) -> list[Candidate]:
        """The layout with the cheapest recompute that fits, in both placements of EP where they differ; with full recompute
        when none fits. Empty: the batch does not divide."""
        count = self.microbatches(layout)
        if count is None:
            return []
        *modes, leanest = self._modes(layout)
        chosen = replace(layout, recompute=leanest)
        memory = self.memories.fullest(chosen, count)
        for mode in modes if self._fits(memory) else ():
            tried = replace(layout, recompute=mode)
            needs = self.memories.fullest(tried, count)
            if self._fits(needs):
                chosen, memory = tried, needs
                break
        return [self.candidate(placed, memory) for placed in self._placed(chosen)]

    def _modes(self, layout: Layout) -> tuple[str, ...]:
        """Recompute modes that the layout may have, the one that costs least time first; ``full`` needs the least memory."""
        if self.pins.recompute:
            return (self.pins.recompute,)
        if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
            return ("none",)
        costs = self.costs
        if costs is None:
            return RECOMPUTE
        return tuple(sorted(RECOMPUTE, key=lambda mode: (mode == "full", costs.recompute_s(layout, mode))))

    def _placed(self, layout: Layout) -> list[Layout]:
        """The layout in each placement of its ep group that is free and makes a difference."""
        if self.pins.ep_placement is not None:
            return [replace(layout, ep_placement=self.pins.ep_placement)]
        if not layout.placement_matters(self.machine.gpus_per_node):
            return [replace(layout, ep_placement="inside")]
        return [replace(layout, ep_placement=placement) for placement in PLACEMENTS]

    def _sizes(self) -> Iterator[Layout]:
        """PP x TP x EP x microbatch with one replica (or as pinned)."""
        pins, g = self.pins, self.machine.gpus_per_node
        schedule = pins.schedule or "1F1B"
        for tp in [pins.tp] if pins.tp else divisors(g):
            for pp in [pins.pp] if pins.pp else [n for n in divisors(self.world) if n <= min(MAX_PP, self.shape.layers)]:
                rest, remainder = divmod(self.world, tp * pp)
                if remainder:
                    continue
                split = self._data_parallel(rest)
                if split is None:
                    continue
                chunks = stage_chunks(schedule, pp)
                base = Layout(pp=pp, dp_replicate=split[0], dp_shard=split[1], tp=tp, schedule=schedule, vstages=chunks)
                for ep in [pins.ep] if pins.ep else divisors(self.shape.experts) if self.shape.experts else [1]:
                    sized = replace(base, ep=ep)
                    if violations(self.shape, sized, self.machine, self.work.seq):
                        continue
                    for microbatch in [pins.microbatch] if pins.microbatch else MICROBATCHES:
                        yield replace(sized, microbatch=microbatch)

    def _data_parallel(self, rest: int) -> tuple[int, int] | None:
        """(replicate, shard) for ``rest`` data-parallel ranks; one replica unless pinned. None: the pins do not make it."""
        replicate, shard = self.pins.dp_replicate, self.pins.dp_shard
        if replicate is None:
            replicate = 1 if shard is None else rest // shard
        if shard is None:
            shard = rest // replicate if rest % replicate == 0 else 0
        return (replicate, shard) if replicate * shard == rest and shard else None

    def _variants(self, layout: Layout) -> Iterator[Layout]:
        """The same sizes with other numbers of replicas and another schedule."""
        replicas = [layout.dp_replicate]
        if self.pins.dp_replicate is None and self.pins.dp_shard is None:
            node = max(1, self.machine.gpus_per_node // layout.tp)
            sizes = {node * n for n in (1, 4, 16)} & set(divisors(layout.dp))
            replicas += [layout.dp // size for size in sorted(sizes) if size < layout.dp]
        schedules = [layout.schedule]
        if self.pins.schedule is None and layout.pp > 1:
            schedules = list(SEARCHED_SCHEDULES)
        pairs = [(n, layout.schedule) for n in replicas[1:]]
        pairs += [(layout.dp_replicate, schedule) for schedule in schedules if schedule != layout.schedule]
        for replicate, schedule in pairs:
            varied = replace(
                layout,
                dp_replicate=replicate,
                dp_shard=layout.dp // replicate,
                schedule=schedule,
                vstages=stage_chunks(schedule, layout.pp),
                recompute=self.pins.recompute or "none",
            )
            if not violations(self.shape, varied, self.machine, self.work.seq):
                yield varied

    def anything_fits(self) -> bool:
        """Is there any layout that fits, with the leanest microbatch and recompute? Looks at memory alone."""
        lean = self.pins.microbatch or 1
        for layout in self._sizes():
            if layout.microbatch != lean:
                continue
            layout = replace(layout, recompute=self.pins.recompute or RECOMPUTE[-1])
            count = self.microbatches(layout)
            if count is not None and self._fits(self.memories.fullest(layout, count)):
                return True
        return False

    def run(self) -> list[Candidate]:
        """Candidates, best first: those that fit by tokens/s, then the others by how little they miss."""
        found: list[Candidate] = []
        too_big: set[Layout] = set()  # sizes at which a smaller microbatch did not fit
        for layout in self._sizes():
            sizes = replace(layout, microbatch=1)
            if sizes in too_big:
                continue
            some = self._least_recompute(layout)
            if some and not some[0].fits:
                too_big.add(sizes)
            found += some
        found.sort(key=rank)
        for candidate in found[:REFINED]:
            found += [c for layout in self._variants(candidate.layout) for c in self._least_recompute(layout)]
        return sorted(found, key=rank)[:KEPT]


def rank(candidate: Candidate) -> tuple[bool, float, int, int, int]:
    """Sort key: fitting first, fast first, and among equals the simpler layout; where no speed is known, the simplest."""
    layout = candidate.layout
    if candidate.fits and candidate.tokens_per_s is None:
        return (False, layout.pp * layout.tp, layout.dp_replicate, -layout.ep, layout.microbatch)
    value = candidate.memory.total if not candidate.fits or candidate.tokens_per_s is None else -candidate.tokens_per_s
    return (not candidate.fits, value, layout.pp, layout.tp, layout.dp_replicate)
