"""Parameters and FLOPs of a model shape, from its config alone; one formula a part. Torch-free; tests hold it to the modules.

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
    router: int = 0  # the routers' matrices, all layers

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.total + other.total, self.active + other.active, self.matmul + other.matmul, self.router + other.router
        )


def matrices(size: int) -> Parameters:
    """Elements that every token is multiplied with."""
    return Parameters(size, size, size)


def vectors(size: int) -> Parameters:
    """Elements that every token meets and no product uses: norms, biases, the input table."""
    return Parameters(size, size, 0)


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


def attention(m: ModelConfig) -> Parameters:
    """One attention block, without the norm before it."""
    if m.mla is not None:
        return matrices(attention_matrices(m)) + vectors(m.mla.kv_lora_rank + (m.mla.q_lora_rank or 0))
    biases = (m.heads + 2 * m.kv_heads) * m.head_dim * m.attention_bias + m.hidden * m.attention_out_bias
    return matrices(attention_matrices(m)) + vectors(2 * m.head_dim * m.qk_norm + biases + m.heads * m.sinks)


def swiglu(hidden: int, width: int) -> Parameters:
    """A dense or shared feed-forward."""
    return matrices(3 * hidden * width)


def experts(count: int, top_k: int, hidden: int, width: int, bias: bool = False) -> Parameters:
    """A layer's routed experts, of which a token uses ``top_k``."""
    matrix, whole = 3 * hidden * width, 3 * hidden * width + (2 * width + hidden) * bias
    return Parameters(count * whole, top_k * whole, top_k * matrix)


def router(m: ModelConfig) -> Parameters:
    """A layer's router. The aux-loss-free bias is state, not a parameter, and is not counted."""
    size = m.hidden * m.experts
    return Parameters(size, size, size, size) + vectors(m.experts * m.router_bias)


def moe(m: ModelConfig) -> Parameters:
    """Router, routed and shared experts of a layer."""
    shared = swiglu(m.hidden, shared_width(m)) + matrices(m.hidden * m.shared_gate)
    return router(m) + experts(m.experts, m.top_k, m.hidden, m.expert_ffn, m.expert_bias) + shared


def block(m: ModelConfig, layer: int) -> Parameters:
    """One layer with its norms."""
    feed_forward = swiglu(m.hidden, m.ffn) if layer < m.first_dense_layers else moe(m)
    return attention(m) + feed_forward + vectors(2 * m.hidden)


def ends(m: ModelConfig, first: bool, last: bool) -> Parameters:
    """What a part holds beside layers: the ``first`` the input table, the ``last`` the final norm and the head."""
    table = m.vocab_size * m.hidden
    total = vectors(table) if first else vectors(0)
    if not last:
        return total
    head = Parameters(0, 0, table) if m.tied_embeddings else matrices(table)
    return total + vectors(m.hidden) + head


def part(m: ModelConfig, layers: range, first: bool, last: bool) -> Parameters:
    """A pipeline stage: consecutive layers and, where it has them, the ends."""
    total = ends(m, first, last)
    for layer in layers:
        total = total + block(m, layer)
    return total


def parameters(m: ModelConfig) -> Parameters:
    """The whole model."""
    return part(m, range(m.layers), first=True, last=True)


def flops(counts: Parameters, squares: int, convention: Convention) -> int:
    """Forward and backward FLOPs a token of these parameters and of attention over ``squares`` (a forward pass's full squares).

    ``titan``: 6 FLOPs an active matrix element, attention over the full square (TorchTitan's get_nparams_and_flops).
    ``megatron``: the router not counted, attention over the causal half (Megatron-Core's num_floating_point_operations).
    """
    if convention == "titan":
        return 6 * counts.matmul + 3 * squares
    if convention == "megatron":
        return 6 * (counts.matmul - counts.router) + 3 * squares // 2
    raise ValueError(f"no FLOP convention {convention!r}; valid: {', '.join(CONVENTIONS)}")


def flops_per_token(m: ModelConfig, seq_len: int, convention: Convention) -> int:
    """Forward and backward FLOPs of one token in a sequence of ``seq_len`` tokens; recomputation is not counted."""
    return flops(parameters(m), m.layers * attention_square(m, seq_len), convention)
