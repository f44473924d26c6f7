"""Parameters and FLOPs of a model shape, from its config alone. Torch-free; tests hold it to the built module and the planner.

Not for bytes or seconds: those depend on a layout and are the planner's. FLOPs always name their convention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.models.support import shared_width

Convention = Literal["titan", "megatron"]
CONVENTIONS: tuple[Convention, ...] = ("titan", "megatron")


@dataclass(frozen=True)
class Parameters:
    """Element counts. ``active``: what one token uses (top_k of the experts); it and ``total`` hold embeddings and the head."""

    total: int
    active: int
    matmul: int  # active elements of matrices that take part in a product: head and router yes; input table, norms, biases no
    router: int  # the routers' matrices, all layers


def attention_matrices(m: ModelConfig) -> int:
    """Elements of one attention block's projections."""
    if m.mla is not None:
        qk = m.mla.qk_nope_head_dim + m.mla.qk_rope_head_dim
        if m.mla.q_lora_rank is None:
            queries = m.hidden * m.heads * qk
        else:
            queries = m.hidden * m.mla.q_lora_rank + m.mla.q_lora_rank * m.heads * qk
        down = m.hidden * (m.mla.kv_lora_rank + m.mla.qk_rope_head_dim)
        up = m.mla.kv_lora_rank * m.heads * (m.mla.qk_nope_head_dim + m.mla.v_head_dim)
        return queries + down + up + m.heads * m.mla.v_head_dim * m.hidden
    return 2 * m.hidden * (m.heads + m.kv_heads) * m.head_dim


def attention_square(m: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs a token of one layer's scores and weighted values, over the full square; a causal mask needs half."""
    if m.mla is not None:
        widths = m.mla.qk_nope_head_dim + m.mla.qk_rope_head_dim + m.mla.v_head_dim
    else:
        widths = 2 * m.head_dim
    return 2 * m.heads * widths * seq_len


def layer_vectors(m: ModelConfig) -> int:
    """Norm weights, biases and sinks of one layer, the feed-forward's not counted."""
    if m.mla is not None:
        return 2 * m.hidden + m.mla.kv_lora_rank + (m.mla.q_lora_rank or 0)
    biases = (m.heads + 2 * m.kv_heads) * m.head_dim * m.attention_bias + m.hidden * m.attention_out_bias
    return 2 * m.hidden + 2 * m.head_dim * m.qk_norm + biases + m.heads * m.sinks


def parameters(m: ModelConfig) -> Parameters:
    """All counts of a model; the aux-loss-free bias is state, not a parameter, and is not counted."""
    moe_layers = m.layers - m.first_dense_layers
    embedding = m.vocab_size * m.hidden
    expert, expert_vectors = 3 * m.hidden * m.expert_ffn, (2 * m.expert_ffn + m.hidden) * m.expert_bias
    router = moe_layers * m.hidden * m.experts
    matmul = (
        embedding  # the head, or the tied table
        + m.layers * attention_matrices(m)
        + m.first_dense_layers * 3 * m.hidden * m.ffn
        + router
        + moe_layers * (3 * m.hidden * shared_width(m) + m.hidden * m.shared_gate + m.top_k * expert)
    )
    vectors = m.layers * layer_vectors(m) + m.hidden + moe_layers * m.experts * m.router_bias
    active = matmul + (0 if m.tied_embeddings else embedding) + vectors + moe_layers * m.top_k * expert_vectors
    total = active + moe_layers * (m.experts - m.top_k) * (expert + expert_vectors)
    return Parameters(total, active, matmul, router)


def flops_per_token(m: ModelConfig, seq_len: int, convention: Convention) -> int:
    """Forward and backward FLOPs of one token in a sequence of ``seq_len`` tokens; recomputation is not counted.

    ``titan``: 6 FLOPs an active matrix element, attention over the full square (TorchTitan's get_nparams_and_flops).
    ``megatron``: the router not counted, attention over the causal half (Megatron-Core's num_floating_point_operations).
    """
    counts = parameters(m)
    square = 3 * m.layers * attention_square(m, seq_len)
    if convention == "titan":
        return 6 * counts.matmul + square
    if convention == "megatron":
        return 6 * (counts.matmul - counts.router) + square // 2
    raise ValueError(f"no FLOP convention {convention!r}; valid: {', '.join(CONVENTIONS)}")
