"""A 4D layout and the rules that the model, the mesh and the node impose on it. Costs are elsewhere.

Rank order, slowest first: dense ``[pp, dp_replicate, dp_shard, tp]``; experts, same ranks, ``[pp, dp_replicate, efsdp, ep]`` with
placement ``inside`` (an ep group's ranks are neighbours) or ``[pp, dp_replicate, ep, efsdp]`` with ``across``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.models.partition import SPLIT_BACKWARD, chunks
from hpcmoe.planner.machine import Machine
from hpcmoe.planner.shapes import Shape

PLACEMENTS = ("inside", "across")
RECOMPUTE = ("none", "selective", "layer", "full")  # published rows have kinds of selective of their own (published.py)


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


def violations(shape: Shape, layout: Layout, machine: Machine, seq: int) -> list[str]:
    """What forbids this layout, each as one line with the numbers; empty when it can be built. ``seq``: tokens of a sequence."""
    out = _tensor_parallel(shape, layout, machine, seq) if layout.tp > 1 else []
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
    if layout.pp > 1 and shape.tied:
        out.append(
            f"model.tied_embeddings with layout.pp={layout.pp}: one table cannot be on the first and the last stage; use pp=1"
        )
    if layout.recompute != "none" and layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        out.append(f"layout.recompute={layout.recompute} does not go with {layout.schedule}, which splits the backward pass")
    return out


def _tensor_parallel(shape: Shape, layout: Layout, machine: Machine, seq: int) -> list[str]:
    """What tensor parallelism divides: heads, widths of dense blocks, vocabulary, sequence. Experts are spread, not divided."""
    g, tp = machine.gpus_per_node, layout.tp
    out = []
    if tp > g:
        out.append(f"layout.tp={tp} needs {tp} GPUs in one node and {machine.name} has {g}; use tp <= {g}")
    elif g % tp:
        out.append(f"layout.tp={tp} does not divide the {g} GPUs of a node")
    sizes = {"model.heads": shape.heads, "model.vocab_size": shape.vocab, "train.seq_len": seq}
    if not shape.mla:
        sizes["model.kv_heads"] = shape.kv_heads
    if shape.layers > shape.moe_layers:
        sizes["model.ffn"] = shape.ffn
    if shape.shared_ffn:
        sizes["the shared experts' width"] = shape.shared_ffn
    return out + [f"layout.tp={tp} does not divide {name}={size}" for name, size in sizes.items() if size % tp]


def stage_chunks(schedule: str, pp: int) -> int:
    """Model chunks on a pipeline rank: ``vstages`` of hpcmoe's own layouts."""
    return chunks(schedule) if pp > 1 else 1
