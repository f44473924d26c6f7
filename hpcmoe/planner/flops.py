"""FLOPs per token for a forward and a backward pass, in the conventions that others publish. Active parameters only.

One run is 23 % apart by convention alone, so a figure never leaves this module without its name. Not time: see compute.py.
"""

from __future__ import annotations

from hpcmoe.planner.params import model_params
from hpcmoe.planner.shapes import Shape

TITAN = "titan: full-square attention, router counted, input embedding not"
MEGATRON = "megatron: causal half of attention, router and input embedding not counted"


def attention_flops(shape: Shape, seq: int, causal: bool) -> float:
    """Score and value products of all layers, forward and backward: ``6 * L * H * (d_qk + d_v) * attended``; 12LHds for GQA."""
    square = shape.attended(seq, causal) if causal else float(seq)
    return 6.0 * shape.layers * shape.heads * (shape.qk_dim + shape.v_dim) * square


def titan_flops(shape: Shape, seq: int) -> float:
    """TorchTitan's ``get_nparams_and_flops``: 6 FLOPs an active matrix parameter, attention over the full square."""
    return 6.0 * model_params(shape).matmul + attention_flops(shape, seq, causal=False)


def megatron_flops(shape: Shape, seq: int) -> float:
    """Megatron-Core's ``num_floating_point_operations`` (2026): attention halved for the causal mask, no router."""
    params = model_params(shape)
    return 6.0 * (params.matmul - params.router) + attention_flops(shape, seq, causal=True)


def titan_2024_flops(shape: Shape, seq: int) -> float:
    """The TorchTitan paper's tables (2024): all parameters, embedding included."""
    return 6.0 * model_params(shape).total + attention_flops(shape, seq, causal=False)


def megatron_2021_flops(shape: Shape, seq: int) -> float:
    """Narayanan et al. 2021, equation 2, which counts the recomputed forward pass: ``96 L h^2 (1 + s/6h + V/16Lh)``."""
    h, layers = shape.hidden, shape.layers
    return 96.0 * layers * h * h * (1 + seq / (6 * h) + shape.vocab / (16 * layers * h))
