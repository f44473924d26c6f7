"""Every number of the planner that no data sheet gives: what it means, its unit, and whether it was fitted, read off or chosen.

Fitted by benchmarks/planner_accuracy.py --fit on every fourth row of a family. The model's form and the chosen numbers were made
with all rows of tests/data/published.yaml in sight, so the other rows are a weaker check than rows never seen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Efficiencies are shares of the data sheet's peak; times are seconds. First what is fitted, then anchors that are not."""

    # share of peak that a large dense bf16 matmul reaches
    gemm_a100: float = 0.85
    gemm_h100: float = 0.645
    # share of peak that flash attention reaches (causal work counted as half)
    attention_a100: float = 0.32
    attention_h100: float = 0.585
    # elements of a matmul dimension at which half of that efficiency is reached (tile and wave waste)
    gemm_half: float = 107.0
    # reads and writes of a hidden-wide vector in a layer's forward pass besides the matmuls (norms, residuals, rope)
    passes: float = 40.0
    # the same for every routed copy of a token (permute, unpermute, weight, all-to-all staging): with hand-fused kernels as
    # Megatron has, and in PyTorch as it comes
    moe_passes_fused: float = 15.8
    moe_passes_eager: float = 47.0
    # share of the passes over memory that torch.compile leaves, of both kinds above
    compiled: float = 0.91
    # share of compute time behind which FSDP's and the pipeline's transfers can hide
    overlap: float = 0.95

    # Anchors, read off and not fitted.
    # share of HBM bandwidth that element-wise kernels reach (streaming benchmarks; only its ratio to ``passes`` matters)
    hbm: float = 0.80
    # share of NVLink that collectives reach: 234.9 of 300 GB/s, NCCL all-reduce on 8 A100 (ml-engineering, network/README)
    nvlink: float = 0.78
    # share of the network: all-to-all at EP 64 and EP 16 on H100, 90 and 81 % (arXiv 2603.07685, table 7)
    network: float = 0.85
    # extra work of the busiest expert rank for each doubling of the experts beyond 4 when nothing forces balance: dropless over
    # forced balance is 0.957 with 8 experts and 0.803 with 128 (Megatron-MoE-ModelZoo)
    imbalance: float = 0.08
    # host time a layer needs in one pass whatever its size, dense, and what experts add (their shapes need a sync): a floor,
    # guessed; it did not move the fit's rows
    host_dense: float = 0.0003
    host_moe: float = 0.0010


FITTED = Constants()

# Chosen by hand, not fitted.
FP8_GAIN = 1.35  # speed of FP8 over bf16 linear layers; end to end the published rows gain 1.2 to 1.5

# Memory: round numbers, the rows that ran out of memory in sight.
BYTES_RESERVED = 2.0 * 2**30  # CUDA context and NCCL buffers: not the model's
HOT_RANK = 1.20  # rows on the fullest expert rank, relative to balance: the rank that runs out of memory first
PADDING = 1.25  # rows of padded experts over real rows, where one matmul size serves all of a rank's experts; not measured yet
SLACK = 0.04  # allocator fragmentation, share of what is allocated and freed within a step
MARGIN = 0.03  # a plan fits when it leaves this share of the limit free


@dataclass(frozen=True)
class GpuSpeed:
    """What a GPU reaches. ``family`` names the fitted constants it borrows."""

    gemm: float
    attention: float
    family: str
    borrowed: bool = False  # not fitted on this GPU


def gpu_speed(gpu: str, c: Constants) -> GpuSpeed:
    """Efficiencies for a GPU's name; one that was never fitted borrows its nearest relative's and says so."""
    name = gpu.upper()
    if "A100" in name or "A800" in name:
        return GpuSpeed(c.gemm_a100, c.attention_a100, "A100", borrowed="64" in name)
    if any(word in name for word in ("H100", "H800", "GH200", "H200")):
        return GpuSpeed(c.gemm_h100, c.attention_h100, "H100", borrowed="64" in name)
    if "MI250" in name:
        return GpuSpeed(0.75 * c.gemm_a100, 0.6 * c.attention_a100, "A100", borrowed=True)
    return GpuSpeed(c.gemm_h100, c.attention_h100, "H100", borrowed=True)
