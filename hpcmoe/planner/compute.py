"""Seconds of one layer's own work on one GPU: matmuls, attention, element-wise kernels, experts; one microbatch, no transfers.

A backward pass is twice a forward one in matmuls and element-wise traffic and 2.5 times in flash attention (Dao 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from hpcmoe.planner.constants import FP8_GAIN, PADDING, Constants, gpu_speed
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.machine import Machine
from hpcmoe.planner.shapes import Shape
from hpcmoe.planner.workload import Workload

ATTENTION_BACKWARD = 2.5
SOFTMAX_BYTES = 14.0  # traffic of an unfused score, forward: written, masked, exponentiated, dropped out, read


@dataclass(frozen=True)
class LayerWork:
    """Seconds of a forward pass, by kind; ``backward`` sums the backward pass's."""

    matmul: float
    attention: float
    elementwise: float
    experts: float
    experts_elementwise: float
    backward: float
    host: float  # floor of one pass

    @property
    def forward(self) -> float:
        return max(self.host, self.matmul + self.attention + self.elementwise + self.experts + self.experts_elementwise)


@dataclass(frozen=True)
class Speed:
    """What the GPU reaches at one precision."""

    matmul: float  # FLOP/s of a large matmul
    attention: float
    memory: float  # bytes/s
    half: float


def speed(machine: Machine, work: Workload, c: Constants) -> Speed:
    """FP8 speeds up linear layers only, by what was measured end to end; attention stays in bf16."""
    reached = gpu_speed(machine.gpu, c)
    base = machine.peak.get("fp32" if work.precision == "fp32" else "bf16") or machine.peak.get("bf16")
    assert base is not None, "Machine.known was not asked"
    assert machine.hbm is not None, "Machine.known was not asked"
    gain = FP8_GAIN if work.precision == "fp8" else 1.0
    return Speed(base * 1e12 * reached.gemm * gain, base * 1e12 * reached.attention, machine.hbm * c.hbm, c.gemm_half)


def gemm(m: float, n: float, k: float, s: Speed) -> float:
    """Seconds of an (m, k) x (k, n) product. Each dimension saturates as ``x / (x + half)``."""
    if m <= 0 or n <= 0 or k <= 0:
        return 0.0
    fill = m / (m + s.half) * n / (n + s.half) * k / (k + s.half)
    return 2.0 * m * n * k / (s.matmul * fill)


def attention_projections(shape: Shape, tokens: float, tp: int, s: Speed) -> float:
    """Seconds of all linear layers of an attention block, forward."""
    h, H = shape.hidden, shape.heads
    out = gemm(tokens, h, H * shape.v_dim / tp, s)
    if shape.mla:
        m = shape.mla
        q = gemm(tokens, m.q_lora, h, s) + gemm(tokens, H * shape.qk_dim / tp, m.q_lora, s) if m.q_lora else 0.0
        q = q or gemm(tokens, H * shape.qk_dim / tp, h, s)
        kv = gemm(tokens, m.kv_lora + m.rope, h, s) + gemm(tokens, H * (m.nope + m.value) / tp, m.kv_lora, s)
        return q + kv + out
    qkv = (H + 2 * shape.kv_heads) * shape.head_dim / tp
    return gemm(tokens, qkv, h, s) + out


def hot_rank(shape: Shape, work: Workload, c: Constants) -> float:
    """Work of the busiest expert rank over the mean's: finer experts are harder to balance (Mixtral 1.1, 128 experts 1.5)."""
    if not work.imbalance or shape.experts <= 4:
        return 1.0
    return 1.0 + c.imbalance * log2(shape.experts / 4)


def layer_work(shape: Shape, layout: Layout, work: Workload, machine: Machine, c: Constants, moe: bool) -> LayerWork:
    """One layer, one microbatch. ``tokens`` is what the TP group shares."""
    s = speed(machine, work, c)
    h, tp, width = shape.hidden, layout.tp, work.compute_bytes
    tokens = layout.microbatch * work.seq / layout.cp
    matmul = attention_projections(shape, tokens, tp, s)
    causal = work.flash
    scores = 2.0 * tokens * shape.heads * (shape.qk_dim + shape.v_dim) * shape.attended(work.seq, causal) / tp
    attention = scores / (s.attention if work.flash else s.matmul)
    left = c.compiled if work.compiled else 1.0
    traffic = left * c.passes * h * width / (tp if work.sequence_parallel else 1)
    if not work.flash:
        traffic += SOFTMAX_BYTES * shape.heads * work.seq / tp
    ffn = shape.ffn if not moe else shape.shared_ffn
    if ffn:
        matmul += gemm(tokens, (shape.mats - 1) * ffn / tp, h, s) + gemm(tokens, h, ffn / tp, s)
        traffic += shape.mats * ffn * width / tp
    experts = experts_traffic = 0.0
    if moe:
        matmul += gemm(tokens / tp, shape.experts, h, s)
        local = max(1.0, shape.experts / layout.ep)
        hot = hot_rank(shape, work, c) * (PADDING if work.padded else 1.0)
        rows = tokens * shape.top_k / tp * layout.expert_tp * hot
        inner = shape.expert_ffn / layout.expert_tp
        each = gemm(rows / local, (shape.mats - 1) * inner, h, s) + gemm(rows / local, h, inner, s)
        experts = local * each
        passes = c.moe_passes_fused if work.fused else c.moe_passes_eager
        experts_traffic = rows * width * (left * passes * h + shape.mats * inner) / s.memory
    elementwise = tokens * traffic / s.memory
    host = c.host_dense + (c.host_moe if moe else 0.0)
    backward = 2.0 * (matmul + elementwise + experts + experts_traffic) + ATTENTION_BACKWARD * attention
    return LayerWork(matmul, attention, elementwise, experts, experts_traffic, max(backward, 2.0 * host), host)


def head_work(shape: Shape, layout: Layout, work: Workload, machine: Machine, c: Constants) -> float:
    """Seconds of the output layer and the loss, forward and backward."""
    s = speed(machine, work, c)
    tokens = layout.microbatch * work.seq / layout.cp
    return 3.0 * gemm(tokens, shape.vocab / layout.tp, shape.hidden, s) + 24.0 * tokens * shape.vocab / layout.tp / s.memory
