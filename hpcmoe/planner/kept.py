"""What a block of hpcmoe's own keeps for its backward pass, tensor by tensor, in each recompute mode. Bytes a token.

Follows models/attention.py, moe.py, experts.py, dispatch.py and recompute.py; --verify holds it to them. ``selective`` keeps
results of attention, matrix products, reduce-scatters and all-to-alls; ``full`` the input. Published rows: activations.py.
"""

from __future__ import annotations

from hpcmoe.planner.constants import HOT_RANK, PADDING
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.shapes import Shape
from hpcmoe.planner.workload import Workload

INDEX = 8.0  # bytes of an int64
ROUTED = 2 * INDEX  # a routed copy of a token: the expert's number, and its row in the buffer


def block(shape: Shape, work: Workload, layout: Layout, moe: bool, recompute: str) -> float:
    """Bytes that one token of a microbatch costs a GPU in one layer; the fullest expert rank's, where routing is not forced."""
    width, tp = work.compute_bytes, layout.tp
    input_ = width * shape.hidden / tp  # between blocks each tp rank has its part of the sequence
    arriving = INDEX if layout.ep > 1 else 0.0  # where a row that came goes
    routed = shape.top_k * (ROUTED + arriving) / tp if moe else 0.0
    if recompute == "full":
        return input_ + routed
    attention = _attention(shape, work, tp, recompute)
    feed_forward = _moe(shape, work, layout, recompute) if moe else _dense(shape, work, tp, shape.ffn, recompute)
    if recompute == "selective":
        return input_ + routed + attention + feed_forward
    return routed + attention + feed_forward + 2 * width * shape.hidden / tp  # the inputs of both norms


def attention_part(shape: Shape, work: Workload, tp: int) -> float:
    """Bytes a token of what is left, without recompute, when a block's feed-forward part has gone back."""
    return _attention(shape, work, tp, "none") + 2 * work.compute_bytes * shape.hidden / tp


def _attention(shape: Shape, work: Workload, tp: int, recompute: str) -> float:
    """Queries, keys and values as attention wants them, its output and log-sum-exp; also the input and the norms of queries and
    keys, or in place of these the output layer's result. Latent attention is counted as if the engine had it."""
    width, heads, kv = work.compute_bytes, shape.heads, shape.kv_heads
    latent = 0.0
    if shape.mla:
        m = shape.mla
        qkv = heads * (2 * shape.qk_dim + m.value)
        latent = (m.q_lora or 0) * 2 + m.kv_lora * 2 + m.rope
    else:
        qkv = (heads + 2 * kv) * shape.head_dim
    out = (width * (qkv + heads * shape.v_dim) + 4.0 * heads) / tp + width * latent
    if recompute == "selective":
        return out + width * shape.hidden / tp
    norms = (width * shape.head_dim + 4.0) * (heads + kv) / tp if shape.qk_norm else 0.0  # inputs, and fp32 scales
    return out + norms + width * shape.hidden  # the input, of the whole sequence


def _dense(shape: Shape, work: Workload, tp: int, ffn: int, recompute: str) -> float:
    """Gate and up; without recompute also the input, silu(gate) and the product, with it the result."""
    width = work.compute_bytes
    if recompute == "selective":
        return width * (2 * ffn + shape.hidden) / tp
    return width * 4 * ffn / tp + width * shape.hidden  # the input, of the whole sequence


def _moe(shape: Shape, work: Workload, layout: Layout, recompute: str) -> float:
    """Router, routed copies, shared experts. The combined copies are read once more by the weights' gradients."""
    width, h, tp, k = work.compute_bytes, shape.hidden, layout.tp, shape.top_k
    hot = HOT_RANK if work.imbalance and layout.ep > 1 else 1.0  # rows that arrive
    padded = hot * (PADDING if work.padded else 1.0)  # rows that are computed
    shared = _dense(shape, work, tp, shape.shared_ffn, recompute) if shape.shared_ffn else 0.0
    if recompute == "selective":
        travelled = width * h * (hot + 1.0) if layout.ep > 1 else width * h * padded
        return shared + k * (travelled + padded * width * 2 * shape.expert_ffn) / tp
    router = (4.0 * h if width < 4.0 or not shape.shared_ffn or tp > 1 else 0.0) + 8.0 * shape.experts  # in fp32
    copies = padded * width * (h + 4 * shape.expert_ffn) + width * h
    return shared + (router + k * copies) / tp
