"""The most that the backward pass of a block of hpcmoe's own holds beside state, gathered weights and what blocks keep.

FSDP2 puts a block's experts in one group and the rest in another. A group's weights go before its gradients are copied into the
buffer of their reduction, and the next group's buffer replaces it (PyTorch 2.13's ``reduce_scatter_max_input_buffers`` of 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.planner.constants import HOT_RANK, PADDING
from hpcmoe.planner.kept import attention_part
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.params import model_params
from hpcmoe.planner.shapes import Shape
from hpcmoe.planner.workload import Workload


@dataclass(frozen=True)
class BlockValues:
    """Values of one block on a rank, unsharded: ``rest`` beside the experts, of these ``ffn`` in the feed-forward part."""

    rest: float
    ffn: float
    experts: float


def block_values(shape: Shape, layout: Layout, moe: bool) -> BlockValues:
    params = model_params(shape)
    layer = params.moe_layer if moe else params.dense_layer
    width = shape.shared_ffn if moe else shape.ffn
    experts = layer.expert / (layout.ep * layout.expert_tp) if moe else 0.0
    return BlockValues(layer.tp / layout.tp + layer.replicated, shape.mats * shape.hidden * width / layout.tp, experts)


def in_block(shape: Shape, work: Workload, layout: Layout, moe: bool, mode: str, kept: float, full: float) -> float:
    """Bytes while one block goes back; ``kept``, ``full``: its activations for a microbatch, in recompute ``mode`` and without.

    The largest of: the shared experts' turn (or the dense part's), the routed experts' turn, and the moments at which the
    gradients of the experts, and of the rest, are copied to be reduced. Later turns have let earlier activations go.
    """
    width, values = work.compute_bytes, block_values(shape, layout, moe)
    tokens = layout.microbatch * work.seq / layout.tp
    again = full - kept + width * tokens * shape.hidden  # and the gradient of the block's output, to its end
    if mode == "selective":  # queries and keys before their rotation stay beside those after it
        again += width * tokens * (shape.heads + shape.kv_heads) * shape.head_dim
    reduced = work.reduce_bytes if layout.pp == 1 else 0.0  # pipelines reduce at the end of a step
    waiting = reduced * values.rest  # of the block before
    ffn = shape.shared_ffn if moe else shape.ffn
    attention = layout.microbatch * work.seq * attention_part(shape, work, layout.tp)
    # three gradients inside a SwiGLU; the product of gate and up is gone by then, and the first weight's gradient is there
    first = again + waiting + width * (tokens * 2.0 * ffn + values.ffn / shape.mats)
    rest_reduced = attention - kept + waiting - (width * values.experts if reduced else 0.0)
    if not moe:
        return max(first, attention - kept + width * values.rest if not reduced else rest_reduced)
    hot = HOT_RANK if work.imbalance and layout.ep > 1 else 1.0
    combined_gone = 0 if mode == "selective" else shape.hidden
    inside = 2.0 * shape.expert_ffn * hot * (PADDING if work.padded else 1.0) - combined_gone
    moving = (2.0 if layout.ep > 1 else 1.0) * shape.hidden * hot
    shared_gone = width * 4.0 * ffn * tokens
    routed = again - shared_gone + waiting + width * values.ffn
    routed += width * max(tokens * shape.top_k * inside + values.experts / shape.mats, tokens * shape.top_k * moving)
    experts_reduced = attention - kept + width * values.ffn + (reduced or width) * values.experts
    return max(first, routed, experts_reduced, rest_reduced)
