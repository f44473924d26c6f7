"""Shape of a decoder MoE language model, in the papers' words. Sizes only; what they cost is the planner's business."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1). Sizes in elements."""

    kv_lora_rank: int = MISSING
    q_lora_rank: int | None = None  # null: queries are projected directly
    qk_nope_head_dim: int = MISSING
    qk_rope_head_dim: int = MISSING
    v_head_dim: int = MISSING


@dataclass
class ModelConfig:
    """Sizes in elements, counts in pieces."""

    name: str = MISSING
    vocab_size: int = MISSING
    hidden: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    kv_heads: int = MISSING
    head_dim: int = MISSING
    mla: MlaConfig | None = None  # null: grouped-query attention
    qk_norm: bool = False
    attention_bias: bool = False  # bias on q, k, v
    attention_out_bias: bool = False
    window: int | None = None  # sliding-window attention: tokens seen back; null: full
    window_every: int = 1  # the window holds in every so many-th layer
    sinks: bool = False  # one learned attention sink a head (GPT-OSS)
    ffn: int = 0  # width of a dense layer's SwiGLU; used by first_dense_layers
    first_dense_layers: int = 0
    experts: int = MISSING
    top_k: int = MISSING
    expert_ffn: int = MISSING  # width of one expert's SwiGLU
    expert_bias: bool = False
    shared_experts: int = 0
    shared_ffn: int | None = None  # width of all shared experts together; null: shared_experts * expert_ffn
    shared_gate: bool = False  # Qwen2-MoE: sigmoid(gate(x)) * shared(x)
    router_bias: bool = False  # a trained bias of the router's linear layer (GPT-OSS)
    score: str = "softmax"  # softmax | sigmoid | topk_softmax
    norm_topk: bool = True  # weights of the chosen experts sum to one
    route_scale: float = 1.0
    groups: int = 1  # group-limited routing: groups of experts
    top_groups: int = 1
    aux_free_bias: bool = True  # aux-loss-free balancing: choice score = score + bias
    bias_update_rate: float = 1e-3
    aux_loss_coef: float = 0.0  # Megatron's normalisation: 1 when balanced, per layer
    z_loss_coef: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    max_seq_len: int = 4096
    init_std: float = 0.02
