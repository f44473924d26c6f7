"""Bytes on the fullest GPU, by kind: parameters, gradients, optimizer, activations, buffers. Not time.

State: FSDP2 with fp32 Adam is 16 bytes a parameter over the shard group; Megatron's distributed optimizer 6 + 12/DP, else 18
(Korthikanti et al. 2022). Expert parameters are sharded over ``world / (ep * pp)``, not over the dense group.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.planner.activations import LayerActivations, layer_activations
from hpcmoe.planner.backward import in_block
from hpcmoe.planner.constants import HOT_RANK, SLACK
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.params import model_params
from hpcmoe.planner.pipeline import in_flight, in_flight_by_chunk
from hpcmoe.planner.shapes import Shape
from hpcmoe.planner.stages import Chunk, Contents, contents, telling
from hpcmoe.planner.workload import Workload

# A logit beside its probability (fp32): forward 16 bit or not at all and an fp32 copy; backward two gradients in fp32.
LOSS_BYTES = 8.0


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
    head: float  # of these, the output layer's (0 when tied)


def held(shape: Shape, layout: Layout, chunks: Contents) -> Held:
    """What a pipeline rank with these chunks holds."""
    params = model_params(shape)
    n_dense, n_moe = sum(c.dense for c in chunks), sum(c.moe for c in chunks)
    dense_layer = params.dense_layer.tp / layout.tp + params.dense_layer.replicated
    moe_layer = params.moe_layer.tp / layout.tp + params.moe_layer.replicated
    experts = params.moe_layer.expert / (layout.ep * layout.expert_tp)
    ends = head = 0.0
    if any(c.first for c in chunks):
        ends += params.embedding / layout.tp + shape.positions * shape.hidden
    if any(c.last for c in chunks):
        head = (params.head or (params.embedding if layout.pp > 1 else 0)) / layout.tp
        ends += head + params.final_norm
    block = max(dense_layer if n_dense else 0.0, moe_layer + experts if n_moe else 0.0)
    return Held(n_dense * dense_layer + n_moe * moe_layer + ends, n_moe * experts, block, ends, head)


def state(values: Held, layout: Layout, work: Workload) -> tuple[float, float, float]:
    """(parameter, gradient, optimizer) bytes that live through the whole step."""
    shard = layout.dp_shard * layout.cp
    whole, sharded = values.dense + values.expert, values.dense / shard + values.expert / max(1, layout.efsdp)
    if layout.zero == "zero1":  # Megatron: 16-bit weights and fp32 gradients whole; fp32 weights and moments sharded
        return 2.0 * whole, 4.0 * whole, 12.0 * sharded
    # PyTorch's pipeline adds up whole gradients over a step's microbatches, in the dtype of their reduction
    summed_whole = layout.pp > 1 and layout.zero == "fsdp"
    grads = work.reduce_bytes * whole if summed_whole else work.grad_bytes * sharded
    return work.param_bytes * sharded, grads, work.optim_bytes * sharded


def unsharded(values: Held, layout: Layout, work: Workload) -> float:
    """Bytes of gathered weights, and of gradients on their way to be reduced as far as backward.py does not count them.

    Two blocks in flight (prefetch), embedding and head beside; the head's gradients, which wait for the embedding's. With a
    pipeline the weights of the rank's layers stay gathered through the step: gathering them again for each microbatch costs more.
    Published rows: also one block's gradients as computed, and the one before as its reduction wants them.
    """
    if layout.zero == "zero1":
        return 0.0
    gathered = 2.0 * values.block + values.ends
    if layout.zero == "zero2" or layout.pp > 1:
        copied = layout.efsdp > 1 or work.own  # PyTorch 2.13 copies in a group of one, too; JUPITER's peaks show no such copy
        gathered = values.dense + (values.expert if copied else 2.0 * values.block)
    if work.own:
        return work.compute_bytes * (gathered + (values.head if layout.pp == 1 else 0.0))
    if layout.pp > 1:
        return work.compute_bytes * (gathered + values.block)
    return work.compute_bytes * (gathered + values.block + values.head) + work.reduce_bytes * values.block


def layer_modes(chunk: Chunk, recompute: str) -> list[tuple[int, bool, str]]:
    """(layers, do they hold experts, what they recompute): ``layer`` is full recompute in layers of even number."""
    counts = ((chunk.dense, chunk.dense_even, False), (chunk.moe, chunk.moe_even, True))
    if recompute != "layer":
        return [(count, moe, recompute) for count, _, moe in counts if count]
    parts = [(even, moe, "full") for _, even, moe in counts] + [(count - even, moe, "none") for count, even, moe in counts]
    return [part for part in parts if part[0]]


class Memories:
    """Memory of one model and workload under many layouts; what layouts share is computed once. ``slack``: as constants.SLACK."""

    def __init__(self, shape: Shape, work: Workload, slack: float = SLACK) -> None:
        self.shape, self.work, self.slack = shape, work, slack
        self._contents: dict[tuple[int, str], tuple[Contents, ...]] = {}
        self._telling: dict[tuple[int, str], tuple[int, ...]] = {}
        self._held: dict[tuple[int | Contents, ...], Held] = {}
        self._layers: dict[tuple[int | str, ...], LayerActivations] = {}

    def contents(self, layout: Layout) -> tuple[Contents, ...]:
        """What each pipeline rank holds."""
        key = (layout.pp, layout.schedule)
        found = self._contents.get(key)
        if found is None:
            found = self._contents[key] = contents(self.shape, layout, self.work.seq, even=not self.work.own)
        return found

    def telling(self, layout: Layout) -> tuple[int, ...]:
        """Pipeline ranks among which the fullest and the slowest are."""
        key = (layout.pp, layout.schedule)
        found = self._telling.get(key)
        if found is None:
            found = self._telling[key] = telling(self.contents(layout))
        return found

    def held_on(self, layout: Layout, rank: int) -> Held:
        """What pipeline rank ``rank`` holds."""
        chunks = self.contents(layout)[rank]
        key = (layout.pp, layout.tp, layout.ep, layout.expert_tp, chunks)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = held(self.shape, layout, chunks)
        return found

    def layer(self, layout: Layout, moe: bool, recompute: str) -> LayerActivations:
        key = (layout.tp, layout.cp, layout.ep, layout.microbatch, recompute, moe)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = layer_activations(self.shape, self.work, layout, moe, recompute)
        return found

    def _kept(self, layout: Layout, chunk: Chunk) -> float:
        """Bytes a chunk keeps for one microbatch."""
        return sum(count * self.layer(layout, moe, mode).kept for count, moe, mode in layer_modes(chunk, layout.recompute))

    def again(self, layout: Layout, rank: int) -> float:
        """Bytes of the layer that is being recomputed, beyond what it kept. Published rows."""
        chunks = self.contents(layout)[rank]
        layers = [self.layer(layout, moe, mode) for c in chunks for _, moe, mode in layer_modes(c, layout.recompute)]
        return max((layer.full - layer.kept for layer in layers), default=0.0)

    def on_rank(self, layout: Layout, microbatches: int, rank: int) -> Memory:
        """Memory of the GPUs of one pipeline rank."""
        shape, work = self.shape, self.work
        chunks = self.contents(layout)[rank]
        values = self.held_on(layout, rank)
        params, grads, optimizer = state(values, layout, work)
        if not work.own:
            activations = self._kept(layout, chunks[0]) * in_flight(layout, microbatches, rank)
        else:
            flight = in_flight_by_chunk(layout, microbatches, rank)
            activations = sum(n * self._kept(layout, chunk) for n, chunk in zip(flight, chunks, strict=True))
        passing = unsharded(values, layout, work)
        tokens = layout.microbatch * work.seq / layout.cp
        logits = tokens * shape.vocab / layout.tp if any(c.last for c in chunks) else 0.0
        if work.own:  # the loss keeps its probabilities; all that it needs is gone before the blocks' turn
            passing += self._in_block(layout, chunks)
            late = next((n for n, chunk in zip(flight, chunks, strict=True) if chunk.last), 1.0)  # microbatches whose loss waits
            if layout.pp > 1:  # PyTorch's stages keep each microbatch's result until its backward pass
                result = tokens * work.compute_bytes * shape.hidden / layout.tp
                passing += sum(n * result for n, chunk in zip(flight, chunks, strict=True) if not chunk.last)
                passing += late * work.compute_bytes * logits  # the last one's result, all through its backward pass
            ends = 4.0 * logits + (tokens * work.compute_bytes * shape.hidden * (1.0 + 1.0 / layout.tp) if logits else 0.0)
            activations += late * ends
            buffers = max(passing - ends, LOSS_BYTES * logits)
            if layout.pp == 1:  # at last, embedding's and head's gradients alone
                buffers = max(buffers, (work.compute_bytes + work.reduce_bytes) * values.ends - activations)
        else:
            passing += self.again(layout, rank)
            if layout.ep > 1 and any(c.moe for c in chunks):  # one all-to-all's send and receive
                hot = HOT_RANK if work.imbalance else 1.0
                passing += 2.0 * work.compute_bytes * tokens * shape.top_k * shape.hidden / layout.tp * hot
            buffers = passing + work.logit_bytes * logits
        buffers += self.received(layout, microbatches, rank)
        buffers += self.slack * (activations + buffers)
        return Memory(params, grads, optimizer, activations, buffers)

    def _in_block(self, layout: Layout, chunks: Contents) -> float:
        """Bytes of the block whose backward pass needs most, beyond what it kept.

        With ``layer`` a layer that keeps all comes between: it is gone by the time that the one before it is recomputed.
        """
        most = 0.0
        for chunk in chunks:
            for _, moe, mode in layer_modes(chunk, layout.recompute):
                if layout.recompute == "layer" and mode == "full" and not chunk.ends_even:
                    continue
                layer = self.layer(layout, moe, mode)
                most = max(most, in_block(self.shape, self.work, layout, moe, mode, layer.kept, layer.full))
        return most

    def received(self, layout: Layout, microbatches: int, rank: int) -> float:
        """Bytes of a pipeline's buffers for hidden states and their gradients: PyTorch's stages have one for each microbatch."""
        if layout.pp == 1 or not self.work.own:
            return 0.0
        ways = sum((not c.first) + (not c.last) for c in self.contents(layout)[rank])
        tokens = layout.microbatch * self.work.seq
        return microbatches * ways * tokens * self.shape.hidden * self.work.compute_bytes / layout.tp

    def fullest(self, layout: Layout, microbatches: int) -> Memory:
        """The fullest of the pipeline's ranks."""
        ranks = self.telling(layout)
        return max((self.on_rank(layout, microbatches, rank) for rank in ranks), key=lambda m: m.total)


def fullest(shape: Shape, layout: Layout, work: Workload, microbatches: int) -> Memory:
    """The fullest GPU of one layout."""
    return Memories(shape, work).fullest(layout, microbatches)
