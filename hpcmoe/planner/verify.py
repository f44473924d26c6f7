"""--verify: the planned rank really built by the engine, with fake tensors and a fake process group; its bytes beside the plan's.

What is compared and said; the building is in built.py. Not a test of speed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.planner.memory import Memories
from hpcmoe.planner.pipeline import in_flight_by_chunk
from hpcmoe.planner.plan import Plan

TOLERANCE = 0.05


@dataclass(frozen=True)
class Kind:
    """Bytes of one kind on the rank."""

    name: str
    planned: float
    built: float

    @property
    def error(self) -> float:
        return self.planned / self.built - 1 if self.built else float(self.planned != 0)


@dataclass(frozen=True)
class Verification:
    """What was compared, ``rank`` of ``world``. ``notes``: what the build is, and what it leaves unverified."""

    layout: str
    rank: int
    world: int
    kinds: tuple[Kind, ...]
    total: Kind
    notes: tuple[str, ...]
    seconds: float

    @property
    def agrees(self) -> bool:
        return all(abs(kind.error) <= TOLERANCE for kind in (*self.kinds, self.total))

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "rank": self.rank,
            "world_size": self.world,
            "agrees": self.agrees,
            "tolerance": TOLERANCE,
            "seconds": self.seconds,
            "bytes": {k.name: {"planned": k.planned, "built": k.built, "error": k.error} for k in (*self.kinds, self.total)},
            "notes": list(self.notes),
        }


def report(result: Verification) -> str:
    """The comparison as text."""
    lines = [f"rank {result.rank} of {result.world}, {result.layout}: built in {result.seconds:.1f} s"]
    for kind in (*result.kinds, result.total):
        planned, built = kind.planned / 2**20, kind.built / 2**20
        lines.append(f"  {kind.name:12} planned {planned:12,.1f} MiB   built {built:12,.1f} MiB   {kind.error:+.2%}")
    lines.append("agrees within 5 %" if result.agrees else "DOES NOT AGREE within 5 %")
    return "\n".join([*lines, *(f"  - {note}" for note in result.notes)])


def verify(config: Config, plan: Plan) -> Verification:
    """Build the plan's fullest rank. Raises UserError where the engine has no code for the model."""
    from hpcmoe.models.support import unsupported_features

    missing = unsupported_features(config.model)
    if missing:
        raise UserError(
            f"--verify: the engine has no {', '.join(missing)} yet, so {config.model.name} is planned but cannot be built"
        )
    from hpcmoe.planner.built import measure

    begun = time.perf_counter()
    layout, work = plan.layout, replace(plan.work, imbalance=False, padded=False)
    microbatches = max(1, work.batch // (layout.dp * layout.microbatch))
    memories = Memories(plan.shape, work, slack=0.0)
    rank = max(memories.telling(layout), key=lambda r: memories.on_rank(layout, microbatches, r).total)
    planned = memories.on_rank(layout, microbatches, rank)
    built = measure(config, layout, work.batch, rank, in_flight_by_chunk(layout, microbatches, rank))
    kinds = (
        Kind("params", planned.params, built.params),
        Kind("grads", planned.grads, built.grads),
        Kind("optimizer", planned.optimizer, built.optimizer),
        Kind("activations", planned.activations, built.activations),
    )
    total = Kind("total", planned.total - memories.received(layout, microbatches, rank), built.peak)
    return Verification(
        f"{layout.describe()}, recompute {layout.recompute}" + (f", {layout.schedule}" if layout.pp > 1 else ""),
        rank * (layout.world // layout.pp),
        layout.world,
        kinds,
        total,
        (
            "the engine's own build, forward and backward pass ran on fake CPU tensors with balanced routing; the plan adds the "
            "fullest rank's share, the padding of experts and an allowance for fragmentation on top",
            "a pipeline's microbatches went through this rank's stages as many as its schedule holds; its transfers are left out",
        ),
        time.perf_counter() - begun,
    )
