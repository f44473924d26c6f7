"""Bytes on the fullest GPU, by kind: parameters, gradients, optimizer, activations, buffers. Not time.

State: FSDP2 with fp32 Adam is 16 bytes a parameter over the shard group; Megatron's distributed optimizer 6 + 12/DP, else 18
(Korthikanti et al. 2022). Expert parameters are sharded over ``world / (ep * pp)``, not over the dense group.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.planner.activations import LayerActivations, layer_activations
from hpcmoe.planner.constants import HOT_RANK, SLACK
from hpcmoe.planner.layout import Layout, layers_on
from hpcmoe.planner.params import model_params
from hpcmoe.planner.pipeline import in_flight
from hpcmoe.planner.shapes import Shape
from hpcmoe.planner.workload import Workload


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    params: float
    grads: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def state(self) -> float:
        return self.params + self.grads + self.optimizer

    @property
    def total(self) -> float:
        return self.state + self.activations + self.buffers


@dataclass(frozen=True)
class Held:
    """Parameter values that one pipeline rank is responsible for, before any data-parallel sharding."""

    dense: float  # values of dense parameters after TP
    expert: float  # values of expert parameters after EP
    block: float  # of the largest layer, both kinds
    ends: float  # embedding and head on this rank, after TP


def held(shape: Shape, layout: Layout, stage: int) -> Held:
    """What pipeline rank ``stage`` holds."""
    params = model_params(shape)
    n_dense, n_moe = layers_on(shape, layout, stage)
    dense_layer = params.dense_layer.tp / layout.tp + params.dense_layer.replicated
    moe_layer = params.moe_layer.tp / layout.tp + params.moe_layer.replicated
    experts = params.moe_layer.expert / (layout.ep * layout.expert_tp)
    ends = 0.0
    if stage == 0:
        ends += params.embedding / layout.tp + shape.positions * shape.hidden
    if stage == layout.pp - 1:
        ends += (params.head or (params.embedding if layout.pp > 1 else 0)) / layout.tp + params.final_norm
    block = max(dense_layer if n_dense else 0.0, moe_layer + experts if n_moe else 0.0)
    return Held(n_dense * dense_layer + n_moe * moe_layer + ends, n_moe * experts, block, ends)


def state(values: Held, layout: Layout, work: Workload) -> tuple[float, float, float]:
    """(parameter, gradient, optimizer) bytes that live through the whole step."""
    shard = layout.dp_shard * layout.cp
    sharded = values.dense / shard + values.expert / max(1, layout.efsdp)
    if layout.zero == "zero1":  # Megatron: 16-bit weights and fp32 gradients whole; fp32 weights and moments sharded
        whole = values.dense + values.expert
        return 2.0 * whole, 4.0 * whole, 12.0 * sharded
    return work.param_bytes * sharded, work.grad_bytes * sharded, work.optim_bytes * sharded


def unsharded(values: Held, layout: Layout, work: Workload) -> float:
    """Bytes of gathered weights and of gradients not yet reduced: two blocks in flight (prefetch), embedding and head beside.

    With a pipeline the weights of the rank's layers stay gathered through the step: gathering them again for each microbatch
    costs more.
    """
    if layout.zero == "zero1":
        return 0.0
    gathered = 2.0 * values.block + values.ends
    if layout.zero == "zero2" or layout.pp > 1:
        gathered = values.dense + (values.expert if layout.efsdp > 1 else 2.0 * values.block)  # a group of one gathers nothing
    return work.compute_bytes * (gathered + values.block)


class Memories:
    """Memory of one model and workload under many layouts; what layouts share is computed once."""

    def __init__(self, shape: Shape, work: Workload) -> None:
        self.shape, self.work = shape, work
        self._held: dict[tuple[int, ...], Held] = {}
        self._layers: dict[tuple[int | str, ...], LayerActivations] = {}

    def held_on(self, layout: Layout, stage: int) -> Held:
        key = (layout.pp, layout.tp, layout.ep, layout.expert_tp, stage)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = held(self.shape, layout, stage)
        return found

    def layer(self, layout: Layout, moe: bool) -> LayerActivations:
        key = (layout.tp, layout.cp, layout.ep, layout.microbatch, layout.recompute, moe)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = layer_activations(self.shape, self.work, layout, moe, layout.recompute)
        return found

    def on_rank(self, layout: Layout, microbatches: int, stage: int) -> Memory:
        """Memory of the GPUs of one pipeline rank."""
        shape, work = self.shape, self.work
        values = self.held_on(layout, stage)
        params, grads, optimizer = state(values, layout, work)
        n_dense, n_moe = layers_on(shape, layout, stage)
        kept = again = 0.0
        for count, moe in ((n_dense, False), (n_moe, True)):
            if count:
                layer = self.layer(layout, moe)
                kept += count * layer.kept
                again = max(again, layer.full - layer.kept)
        activations = kept * in_flight(layout, microbatches, stage) + (again if layout.recompute != "none" else 0.0)
        buffers = unsharded(values, layout, work)
        tokens = layout.microbatch * work.seq / layout.cp
        if n_moe and layout.ep > 1:  # one all-to-all's send and receive
            hot = HOT_RANK if work.imbalance else 1.0
            buffers += 2.0 * work.compute_bytes * tokens * shape.top_k * shape.hidden / layout.tp * hot
        if stage == layout.pp - 1:
            buffers += work.logit_bytes * tokens * shape.vocab / layout.tp
        buffers += SLACK * (activations + buffers)
        return Memory(params, grads, optimizer, activations, buffers)

    def fullest(self, layout: Layout, microbatches: int) -> Memory:
        """The fullest of the pipeline's ranks: the first (most in flight), its neighbour, or the last (logits)."""
        stages = {0, min(1, layout.pp - 1), layout.pp - 1}
        return max((self.on_rank(layout, microbatches, stage) for stage in stages), key=lambda m: m.total)


def fullest(shape: Shape, layout: Layout, work: Workload, microbatches: int) -> Memory:
    """The fullest GPU of one layout."""
    return Memories(shape, work).fullest(layout, microbatches)
