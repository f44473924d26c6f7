"""How many parameters a model has, by the bucket that decides how they are sharded: TP, replicated in TP, experts.

Not bytes (memory.py) and not FLOPs (flops.py). Formulas: GQA ``h*H*d + 2*h*G*d + H*d*h``; SwiGLU ``3*h*f``; router ``h*E``;
MLA as in DeepSeek-V2, section 2.1 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hpcmoe.planner.shapes import Shape


@dataclass(frozen=True)
class LayerParams:
    """Parameters of one layer. ``tp``: split by tensor parallelism; ``replicated``: whole on each TP rank; ``expert``: routed."""

    tp: int
    replicated: int
    expert: int
    expert_active: int  # of the routed experts, those a token uses
    router: int  # matrix only; part of ``replicated``

    @property
    def total(self) -> int:
        return self.tp + self.replicated + self.expert

    @property
    def active(self) -> int:
        return self.tp + self.replicated + self.expert_active


@dataclass(frozen=True)
class ModelParams:
    """Parameters of a whole model; ``matmul``: active ones in a matrix product (router and head, not embedding)."""

    dense_layer: LayerParams
    moe_layer: LayerParams
    embedding: int
    head: int  # 0 when tied
    final_norm: int
    total: int
    active: int
    matmul: int
    router: int


def attention_params(shape: Shape) -> tuple[int, int, int]:
    """(matrices, other values split by TP, values whole on each TP rank) of one attention block, norms of q and k included."""
    h, H = shape.hidden, shape.heads
    if shape.mla:
        m = shape.mla
        whole = h * (m.kv_lora + m.rope)  # the latent projections are too narrow to split
        norms = m.kv_lora
        split = m.kv_lora * H * (m.nope + m.value) + H * m.value * h
        if m.q_lora:
            whole += h * m.q_lora
            norms += m.q_lora
            split += m.q_lora * H * shape.qk_dim
        else:
            split += h * H * shape.qk_dim
        return split, 0, whole + norms
    d, G = shape.head_dim, shape.kv_heads
    matrices = h * H * d + 2 * h * G * d + H * d * h
    split = (H + 2 * G) * d if shape.attention_bias or shape.linear_bias else 0
    split += H if shape.sinks else 0
    whole = 2 * d if shape.qk_norm else 0
    whole += h if shape.attention_out_bias or shape.linear_bias else 0
    return matrices, split, whole


def _norm(shape: Shape) -> int:
    return 2 * shape.hidden if shape.linear_bias else shape.hidden


def _ffn(shape: Shape, width: int, bias: bool) -> int:
    biases = (shape.mats - 1) * width + shape.hidden if bias else 0
    return shape.mats * shape.hidden * width + biases


def layer_params(shape: Shape, moe: bool) -> LayerParams:
    """One layer's parameters. ``moe``: the layer holds experts instead of a dense feed-forward block."""
    matrices, split, whole = attention_params(shape)
    tp, replicated = matrices + split, whole + 2 * _norm(shape)
    if not moe:
        return LayerParams(tp + _ffn(shape, shape.ffn, shape.linear_bias), replicated, 0, 0, 0)
    expert = _ffn(shape, shape.expert_ffn, shape.expert_bias)
    router = shape.hidden * shape.experts
    replicated += router + (shape.experts if shape.router_bias else 0) + (shape.hidden if shape.shared_gate else 0)
    if shape.shared_ffn:
        tp += _ffn(shape, shape.shared_ffn, False)
    return LayerParams(tp, replicated, shape.experts * expert, shape.top_k * expert, router)


def _vector_params(shape: Shape, moe: bool) -> int:
    """Active values of a layer that no matrix product uses: norms, biases, sinks."""
    _, split, whole = attention_params(shape)
    vectors = split + 2 * _norm(shape)
    if shape.mla:
        vectors += shape.mla.kv_lora + shape.mla.q_lora
    else:
        vectors += whole
    if not moe:
        return vectors + (_ffn(shape, shape.ffn, True) - _ffn(shape, shape.ffn, False) if shape.linear_bias else 0)
    if shape.expert_bias:
        vectors += shape.top_k * (_ffn(shape, shape.expert_ffn, True) - _ffn(shape, shape.expert_ffn, False))
    return vectors + (shape.experts if shape.router_bias else 0)


@lru_cache(maxsize=256)
def model_params(shape: Shape) -> ModelParams:
    """All counts of a model."""
    dense, moe = layer_params(shape, moe=False), layer_params(shape, moe=bool(shape.experts))
    n_moe, n_dense = shape.moe_layers, shape.layers - shape.moe_layers
    embedding = shape.vocab * shape.hidden
    head = 0 if shape.tied else embedding
    rest = embedding + head + _norm(shape) + shape.positions * shape.hidden
    total = n_dense * dense.total + n_moe * moe.total + rest
    active = n_dense * dense.active + n_moe * moe.active + rest
    vectors = n_dense * _vector_params(shape, False) + (n_moe * _vector_params(shape, True) if n_moe else 0)
    matmul = active - vectors - _norm(shape) - shape.positions * shape.hidden - (0 if shape.tied else embedding)
    router = n_moe * moe.router
    return ModelParams(dense, moe, embedding, head, _norm(shape), total, active, matmul, router)
