"""A 4D layout and the rules that the model, the mesh and the node impose on it. Costs are elsewhere.

Rank order, slowest first: dense ``[pp, dp_replicate, dp_shard, tp]``; experts, same ranks, ``[pp, dp_replicate, efsdp, ep]`` with
placement ``inside`` (an ep group's ranks are neighbours) or ``[pp, dp_replicate, ep, efsdp]`` with ``across``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.planner.machine import Machine
from hpcmoe.planner.shapes import Shape

SCHEDULES = ("1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
PLACEMENTS = ("inside", "across")
RECOMPUTE = ("none", "selective", "full")  # published rows add selective_op: TorchTitan's, every second matmul again


@dataclass(frozen=True)
class Layout:
    """``vstages``: model chunks on one pipeline rank. ``zero``: fsdp (all sharded), zero2 (weights whole), zero1 (Megatron's).

    ``cp`` and ``expert_tp`` are for published rows; hpcmoe's own layouts leave them at 1.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1
    schedule: str = "1F1B"
    microbatch: int = 1
    recompute: str = "none"
    vstages: int = 1
    cp: int = 1
    expert_tp: int = 1
    zero: str = "fsdp"
    ep_placement: str = "inside"

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks over which one expert's parameters are sharded."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.expert_tp)

    @property
    def ep_stride(self) -> int:
        """Distance of neighbours of an ep group in the rank order."""
        return self.efsdp if self.ep_placement == "across" else 1

    @property
    def efsdp_stride(self) -> int:
        return 1 if self.ep_placement == "across" else self.ep * self.expert_tp

    def placement_matters(self, gpus_per_node: int) -> bool:
        """Do the two placements of the ep group use other links? Not where one group is all, or all lies in one node."""
        return self.ep > 1 and self.efsdp > 1 and self.ep * self.efsdp > gpus_per_node

    def describe(self) -> str:
        rep = f" x replicate {self.dp_replicate}" if self.dp_replicate > 1 else ""
        across = " across" if self.ep_placement == "across" else ""
        return f"PP {self.pp}, DP shard {self.dp_shard}{rep}, TP {self.tp}, EP {self.ep}{across}"


def chunks_for(schedule: str) -> int:
    """Model chunks a pipeline rank holds by default under a schedule."""
    return 2 if schedule in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV") else 1


def violations(shape: Shape, layout: Layout, machine: Machine) -> list[str]:
    """What forbids this layout, each as one line with the numbers; empty when it can be built."""
    out = []
    g = machine.gpus_per_node
    if layout.tp > g:
        out.append(f"layout.tp={layout.tp} needs {layout.tp} GPUs in one node and {machine.name} has {g}; use tp <= {g}")
    elif g % layout.tp:
        out.append(f"layout.tp={layout.tp} does not divide the {g} GPUs of a node")
    for name, size in (("heads", shape.heads), ("kv_heads", shape.kv_heads if not shape.mla else layout.tp)):
        if size % layout.tp:
            out.append(f"layout.tp={layout.tp} does not divide model.{name}={size}")
    width = shape.expert_ffn if shape.experts else shape.ffn
    if width % layout.tp:
        out.append(f"layout.tp={layout.tp} does not divide the feed-forward width {width}")
    if layout.ep > 1 and not shape.experts:
        out.append(f"layout.ep={layout.ep}, but {shape.name} has no experts")
    elif shape.experts and shape.experts % layout.ep:
        divisors = ", ".join(str(n) for n in range(1, shape.experts + 1) if shape.experts % n == 0)
        out.append(f"layout.ep={layout.ep} does not divide model.experts={shape.experts}; it may be {divisors}")
    if (layout.dp_shard * layout.tp) % layout.ep:
        out.append(
            f"layout.ep={layout.ep} does not divide dp_shard * tp = {layout.dp_shard} * {layout.tp}, over which it is folded"
        )
    if layout.pp * layout.vstages > shape.layers:
        out.append(
            f"layout.pp={layout.pp} with {layout.vstages} chunks a rank needs more layers than model.layers={shape.layers}"
        )
    return out


def layers_on(shape: Shape, layout: Layout, stage: int) -> tuple[int, int]:
    """(dense, moe) layers on a pipeline rank; as even as can be, the early ranks taking what is left over."""
    base, extra = divmod(shape.layers, layout.pp)
    first = stage * base + min(stage, extra)
    count = base + (1 if stage < extra else 0)
    dense_before = shape.layers - shape.moe_layers
    dense = max(0, min(dense_before - first, count))
    return dense, count - dense
