"""Bytes of activations that one layer keeps for its backward pass, by recompute mode. Whole-GPU memory is memory.py's.

hpcmoe's own blocks: kept.py. Blocks of published rows: GPT blocks as Korthikanti et al. 2022, section 4,
``s*b*h*(34 + 5*H*s/h)/t`` with sequence parallelism, where flash attention removes the last term; SwiGLU and MoE blocks below.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.planner.constants import HOT_RANK, PADDING
from hpcmoe.planner.kept import block
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.shapes import Shape
from hpcmoe.planner.workload import Workload


@dataclass(frozen=True)
class LayerActivations:
    """Bytes on one GPU for one microbatch. ``kept``: until the layer's backward pass; ``full``: without any recompute."""

    kept: float
    full: float


def gpt_layer(shape: Shape, work: Workload, tp: int, recompute: str) -> float:
    """Bytes a token of a GPT block (GELU, LayerNorm, dropout, 16-bit). Korthikanti et al. 2022, equations 1 to 6."""
    h = shape.hidden
    if recompute == "full":
        return 2.0 * h
    core = 0.0 if work.flash or recompute == "selective" else 5.0 * shape.heads * work.seq / tp
    masks = 3.0 if shape.linear_bias else 0.0  # one-byte dropout masks; GPTs without biases (MPT) train without dropout too
    if work.sequence_parallel:
        return (31.0 + masks) * h / tp + core
    return 10.0 * h + (21.0 + masks) * h / tp + core


def _attention(shape: Shape, selective: bool, width: float) -> float:
    """Values a token: norm output, q/k/v as attention wants them, its output, and what norms of q and k add."""
    h, H, G = shape.hidden, shape.heads, shape.kv_heads
    if shape.mla:
        m = shape.mla
        qkv = 0 if selective else H * (2 * shape.qk_dim + m.value)  # the up-projections from the latents are cheap to redo
        latent = (m.q_lora or 0) * 2 + m.kv_lora * 2 + m.rope
    else:
        qkv = (H + 2 * G) * shape.head_dim
        latent = 0
    norms = (H + G) * shape.head_dim if shape.qk_norm else 0  # the inputs of q's and k's norms
    out = H * shape.v_dim
    kept = width * (h + qkv + out + latent + (0 if selective else h + norms)) + 4.0 * H
    return kept


def swiglu_layer(shape: Shape, work: Workload, moe: bool, recompute: str) -> tuple[float, float]:
    """(bytes a token outside the experts, bytes a routed copy of a token) that one layer keeps.

    ``selective`` keeps the results of attention, matmuls and all-to-alls, and recomputes norms, activation functions and MLA's
    up-projections. ``selective_moe`` (published rows) recomputes whole expert blocks, ``selective_op`` every second matmul.
    """
    h, width = shape.hidden, work.compute_bytes
    if recompute == "full":
        return width * h, 0.0
    selective = recompute.startswith("selective")
    half = 0.5 if recompute == "selective_op" else 1.0
    dense = _attention(shape, selective, width) + width * h * (1 if selective else 2)  # residual in, norm out
    per_ffn = 2 * half if selective else 3 if work.fused else 4  # gate and up; the product; without fusion also silu(gate)
    if not moe:
        return dense + width * per_ffn * shape.ffn, 0.0
    dense += width * per_ffn * shape.shared_ffn + 4.0 * h + 8.0 * shape.experts  # the router works in fp32: input, logits, scores
    if recompute == "selective_moe":
        return dense, 0.0
    inside = 1 if work.precision == "fp8" else width
    ends = 1 if work.fused else 2  # the input; and the output where routing weights are applied after the expert
    return dense, inside * (ends * h + per_ffn * shape.expert_ffn)


def layer_activations(shape: Shape, work: Workload, layout: Layout, moe: bool, recompute: str) -> LayerActivations:
    """Bytes on the fullest GPU for one microbatch of ``layout.microbatch`` sequences."""
    tokens = layout.microbatch * work.seq / layout.cp
    if work.own:
        kept, full = (block(shape, work, layout, moe, mode) for mode in (recompute, "none"))
        return LayerActivations(tokens * kept, tokens * full)
    split = layout.tp if work.sequence_parallel else 1

    def total(mode: str) -> float:
        if shape.mats == 2 and not moe:
            return tokens * gpt_layer(shape, work, layout.tp, mode)
        dense, copy = swiglu_layer(shape, work, moe, mode)
        hot = HOT_RANK if work.imbalance and layout.ep > 1 else 1.0
        hot *= PADDING if work.padded else 1.0
        return tokens * (
            dense / (1 if mode == "full" and not work.sequence_parallel else split) + shape.top_k * hot * copy / layout.tp
        )

    return LayerActivations(kept=total(recompute), full=total("none"))
