"""Seconds of one optimizer step, by part: work, recompute, transfers that nothing hides, pipeline bubble, optimizer.

Not memory, and not the choice between layouts. One ``Costs`` serves a whole search: what layouts share is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.planner.comm import all_to_all, dedup_factor, in_node, ring, wires
from hpcmoe.planner.compute import LayerWork, head_work, hot_rank, layer_work
from hpcmoe.planner.constants import FITTED, Constants
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.machine import Machine
from hpcmoe.planner.memory import Memories, layer_modes
from hpcmoe.planner.pipeline import bubble_s
from hpcmoe.planner.shapes import Shape
from hpcmoe.planner.workload import Workload

OPTIMIZER_BYTES = 32.0  # traffic of AdamW and of the gradient norm a sharded fp32 parameter


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and one microbatch; the transfers are whole (hidden shares are taken off later)."""

    work: LayerWork
    tp: float  # tensor-parallel transfers of a forward pass
    a2a: float  # expert transfers of a forward pass

    def again(self, recompute: str, work: Workload) -> tuple[float, float, float]:
        """(work, tp, a2a) that recomputation adds to the backward pass."""
        w, flash = self.work, work.flash
        if recompute == "full":
            return w.forward, self.tp, self.a2a
        if recompute == "selective" and work.own:  # all but products, attention, reduce-scatters, all-to-alls: half of tp's
            return w.elementwise + w.experts_elementwise, 0.5 * self.tp, 0.0
        if recompute.startswith("selective"):
            core = 0.0 if flash else w.attention
            if recompute == "selective_moe":
                return w.experts + w.experts_elementwise + 0.5 * w.elementwise, 0.0, self.a2a
            matmuls = 0.5 * (w.matmul + w.experts) if recompute == "selective_op" else 0.0
            return 0.5 * (w.elementwise + w.experts_elementwise) + core + matmuls, 0.0, 0.0
        return 0.0, 0.0, 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, by part; they add up to ``total``."""

    matmul: float
    attention: float
    experts: float
    elementwise: float
    recompute: float
    tensor_parallel: float
    all_to_all: float
    fsdp: float
    pipeline_bubble: float
    pipeline_transfer: float
    head: float
    optimizer: float
    total: float
    microbatches: int

    def parts(self) -> dict[str, float]:
        return {k: v for k, v in self.__dict__.items() if k not in ("total", "microbatches")}


class Costs:
    """Step times of one model and workload on one machine."""

    def __init__(self, shape: Shape, work: Workload, machine: Machine, constants: Constants = FITTED) -> None:
        self.shape, self.work, self.machine, self.c = shape, work, machine, constants
        self.wires = wires(machine, constants)
        self._layers: dict[tuple[int, ...], LayerTime] = {}
        self._heads: dict[tuple[int, ...], float] = {}
        self.memories = Memories(shape, work)

    def layer(self, layout: Layout, moe: bool) -> LayerTime:
        local = in_node(layout.ep, layout.ep_stride, self.wires.gpus_per_node)
        key = (layout.tp, layout.ep, local, layout.microbatch, layout.cp, layout.expert_tp, moe)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = self._layer(layout, moe)
        return found

    def _layer(self, layout: Layout, moe: bool) -> LayerTime:
        shape, work = self.shape, self.work
        tokens = layout.microbatch * work.seq / layout.cp
        done = layer_work(shape, layout, work, self.machine, self.c, moe)
        activation = tokens * shape.hidden * work.compute_bytes
        # with sequence parallelism: gather and scatter around attention, and around the dense block (or shared expert)
        blocks = 2 if not moe or shape.shared_ffn else 1
        tp = 2.0 * blocks * ring(activation, layout.tp, 1, self.wires)
        if layout.cp > 1:  # keys and values go around the ring of context ranks
            kv = tokens * layout.cp * 2 * shape.kv_heads * shape.head_dim * work.compute_bytes / layout.tp
            tp += ring(kv, layout.cp, layout.tp, self.wires)
        tp *= 1.0 - work.overlap_tp
        a2a = 0.0
        if moe and layout.ep * layout.expert_tp > 1:
            hot = hot_rank(shape, work, self.c)
            sent = activation * shape.top_k / layout.tp * hot
            local = in_node(layout.ep, layout.ep_stride, self.wires.gpus_per_node)
            fewer = dedup_factor(layout.ep, shape.top_k, local) if work.dedup else None
            a2a = 2.0 * all_to_all(sent, layout.ep, self.wires, fewer, layout.ep_stride)
            a2a += 2.0 * ring(sent * layout.expert_tp, layout.expert_tp, 1, self.wires)
            a2a *= 1.0 - work.overlap_a2a
        return LayerTime(done, tp, a2a)

    def _head(self, layout: Layout) -> float:
        key = (layout.tp, layout.microbatch, layout.cp)
        if key not in self._heads:
            self._heads[key] = head_work(self.shape, layout, self.work, self.machine, self.c)
        return self._heads[key]

    def _layers_of(self, layout: Layout, rank: int) -> list[tuple[int, LayerTime, str]]:
        """(number, time of one, what it recomputes) of each kind of layer on a pipeline rank."""
        kinds = [kind for chunk in self.memories.contents(layout)[rank] for kind in layer_modes(chunk, layout.recompute)]
        return [(count, self.layer(layout, moe), mode) for count, moe, mode in kinds]

    def recompute_s(self, layout: Layout, mode: str) -> float:
        """Seconds that a recompute mode adds to a microbatch's backward pass through one MoE (else dense) layer."""
        layer = self.layer(layout, bool(self.shape.experts))
        return 0.5 * sum(layer.again("full", self.work)) if mode == "layer" else sum(layer.again(mode, self.work))

    def microbatch(self, layout: Layout, rank: int) -> dict[str, float]:
        """Seconds of one microbatch's forward and backward pass through all chunks of one pipeline rank, by part."""
        out = dict.fromkeys(("matmul", "attention", "experts", "elementwise", "recompute", "tensor_parallel", "all_to_all"), 0.0)
        for count, t, mode in self._layers_of(layout, rank):
            w = t.work
            again, tp_again, a2a_again = t.again(mode, self.work)
            idle = (
                w.forward + w.backward - 3.0 * (w.matmul + w.elementwise + w.experts + w.experts_elementwise) - 3.5 * w.attention
            )
            out["matmul"] += count * 3.0 * w.matmul
            out["attention"] += count * 3.5 * w.attention
            out["experts"] += count * 3.0 * w.experts
            out["elementwise"] += count * (3.0 * (w.elementwise + w.experts_elementwise) + idle)
            out["recompute"] += count * again
            out["tensor_parallel"] += count * (2.0 * t.tp + tp_again)
            out["all_to_all"] += count * (2.0 * t.a2a + a2a_again)
        out["head"] = self._head(layout) if any(c.last for c in self.memories.contents(layout)[rank]) else 0.0
        return out

    def _bubble(self, layout: Layout, rank: int, both_passes: float) -> float:
        """Idle seconds of a step; ``rank`` paces the pipeline and needs ``both_passes`` for a microbatch."""
        if layout.pp == 1:
            return 0.0
        forward = weight = 0.0
        for count, t, _ in self._layers_of(layout, rank):
            forward += count * (t.work.forward + t.tp + t.a2a)
            weight += count * (t.work.matmul + t.work.experts)
        head = self._head(layout) / 3 if any(c.last for c in self.memories.contents(layout)[rank]) else 0.0
        forward, weight = forward + head, weight + head
        return bubble_s(layout, forward, both_passes - forward - weight, weight)

    def _data_parallel(self, layout: Layout, rank: int) -> tuple[float, float]:
        """Seconds of FSDP's transfers (per microbatch, per step) on one rank, hidden or not."""
        values, work = self.memories.held_on(layout, rank), self.work
        shard, stride = layout.dp_shard * layout.cp, layout.tp
        w = self.wires

        chunks = self.memories.contents(layout)[rank]
        n_dense, n_moe = sum(c.dense for c in chunks), sum(c.moe for c in chunks)

        def both(bytes_a_value: float) -> float:
            dense = ring(values.dense * bytes_a_value, shard, stride, w, n_dense + n_moe + 1)
            return dense + ring(values.expert * bytes_a_value, max(1, layout.efsdp), layout.efsdp_stride, w, n_moe)

        gather, reduce = both(work.compute_bytes), both(work.reduce_bytes)
        once = 0.0
        if layout.dp_replicate > 1:
            mine = values.dense / shard + values.expert / max(1, layout.efsdp)
            once += 2.0 * ring(mine * work.reduce_bytes, layout.dp_replicate, shard * stride, w)
        if layout.zero == "zero1":
            return 0.0, once + gather + reduce
        if layout.pp > 1:
            return 0.0, once + gather + reduce
        if layout.zero == "zero2":
            return gather + reduce, once
        return 2.0 * gather + reduce, once

    def step(self, layout: Layout) -> StepTime:
        """The whole step. ``batch`` is divided over data parallelism; a remainder costs a full microbatch."""
        work = self.work
        microbatches = max(1, round(work.batch / (layout.dp * layout.microbatch)))
        worst, slow = 0, -1.0
        parts: dict[str, float] = {}
        for rank in self.memories.telling(layout):
            found = self.microbatch(layout, rank)
            seconds = sum(found.values())
            if seconds > slow:
                worst, slow, parts = rank, seconds, found
        busy = slow - parts["tensor_parallel"] - parts["all_to_all"]
        each, once = self._data_parallel(layout, worst)
        exposed = microbatches * max(each * 0.03, each - self.c.overlap * busy) + max(once * 0.1, once - self.c.overlap * busy)
        bubble = self._bubble(layout, worst, slow)
        transfer = 0.0
        if layout.pp > 1:
            size = layout.microbatch * work.seq / layout.cp * self.shape.hidden * work.compute_bytes / layout.tp
            inside = in_node(layout.pp, layout.world // layout.pp, self.wires.gpus_per_node) == layout.pp
            wire = 2.0 * layout.vstages * size / (self.wires.inside if inside else self.wires.outside)
            transfer = microbatches * max(0.0, wire - self.c.overlap * busy)
        values = self.memories.held_on(layout, worst)
        mine = values.dense / (layout.dp_shard * layout.cp) + values.expert / max(1, layout.efsdp)
        assert self.machine.hbm is not None
        optimizer = OPTIMIZER_BYTES * mine / (self.machine.hbm * self.c.hbm)
        total = microbatches * slow + exposed + bubble + transfer + optimizer
        scaled = {name: microbatches * value for name, value in parts.items()}
        return StepTime(
            **scaled,
            fsdp=exposed,
            pipeline_bubble=bubble,
            pipeline_transfer=transfer,
            optimizer=optimizer,
            total=total,
            microbatches=microbatches,
        )
