"""The sizes of a model as the planner's arithmetic wants them: plain, frozen, and wide enough for the published rows too.

Not a configuration: users write hpcmoe.config.model_schema.ModelConfig, which becomes a Shape here. No costs here either.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.config.model_schema import ModelConfig


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, section 2.1). Elements; ``q_lora`` 0: queries are projected directly."""

    kv_lora: int
    q_lora: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Shape:
    """One decoder. ``experts`` 0: every layer is dense. ``mats``: matrices in a feed-forward block, 3 SwiGLU, 2 GELU."""

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mla: MlaShape | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    window: int | None = None
    window_every: int = 1
    sinks: bool = False
    ffn: int = 0
    mats: int = 3
    dense_layers: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    expert_bias: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    tied: bool = False
    linear_bias: bool = False  # GPT: every linear layer has one, and norms have two vectors
    positions: int = 0  # learned positions (GPT)

    @property
    def moe_layers(self) -> int:
        """Layers that hold experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def qk_dim(self) -> int:
        """Query/key width of one head."""
        return self.mla.nope + self.mla.rope if self.mla else self.head_dim

    @property
    def v_dim(self) -> int:
        """Value width of one head."""
        return self.mla.value if self.mla else self.head_dim

    def attended(self, seq: int, causal: bool) -> float:
        """Tokens one token attends to, averaged over positions and layers (sliding windows counted)."""
        full = seq / 2 if causal else float(seq)
        if self.window is None or self.window >= seq:
            return full
        windowed = min(float(self.window), full)
        share = 1 / self.window_every
        return share * windowed + (1 - share) * full


def from_config(model: ModelConfig) -> Shape:
    """The planner's view of a configured model. A sink or bias the family has is counted as a parameter."""
    mla = model.mla
    shared = model.shared_ffn if model.shared_ffn is not None else model.shared_experts * model.expert_ffn
    return Shape(
        name=model.name,
        vocab=model.vocab_size,
        hidden=model.hidden,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        mla=None
        if mla is None
        else MlaShape(mla.kv_lora_rank, mla.q_lora_rank or 0, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim),
        qk_norm=model.qk_norm,
        attention_bias=model.attention_bias,
        attention_out_bias=model.attention_out_bias,
        window=model.window,
        window_every=model.window_every,
        sinks=model.sinks,
        ffn=model.ffn,
        dense_layers=model.first_dense_layers if model.experts else model.layers,
        experts=model.experts,
        top_k=model.top_k,
        expert_ffn=model.expert_ffn,
        expert_bias=model.expert_bias,
        shared_ffn=shared if model.shared_experts or model.shared_ffn else 0,
        shared_gate=model.shared_gate,
        router_bias=model.router_bias,
        tied=model.tied_embeddings,
    )
