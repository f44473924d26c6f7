"""Which model shapes this engine can build; torch-free, so that validation refuses the others before anything is submitted.

Not for what a shape costs (hpcmoe.models.accounting) and not for layouts (hpcmoe.engine.support).
"""

from __future__ import annotations

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.errors import UserError, unknown_name

SCORES = ("softmax", "sigmoid", "topk_softmax")


def unsupported_features(model: ModelConfig) -> list[str]:
    """Features the config asks for and the engine has no code for, as ``key=value`` words; the planner still counts them."""
    wanted = {
        "mla": model.mla is not None,
        "window": model.window is not None,
        "sinks": model.sinks,
        "expert_bias": model.expert_bias,
    }
    return [f"model.{key}" for key, asked in wanted.items() if asked]


def check_model(model: ModelConfig) -> None:
    """Raise UserError for a shape that cannot be built: features without code, sizes that do not fit each other."""
    missing = unsupported_features(model)
    if missing:
        raise UserError(f"model {model.name!r} can be planned but not trained yet: the engine has no {', '.join(missing)}")
    if model.score not in SCORES:
        raise UserError(unknown_name("model.score", model.score, SCORES))
    for key in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "experts", "top_k", "expert_ffn", "groups"):
        if getattr(model, key) < 1:
            raise UserError(f"model.{key}={getattr(model, key)} must be at least 1")
    if model.heads % model.kv_heads:
        raise UserError(f"model.heads={model.heads} must be a multiple of model.kv_heads={model.kv_heads}")
    if model.head_dim % 2:
        raise UserError(f"model.head_dim={model.head_dim} must be even (rotary embeddings turn pairs)")
    if model.experts % model.groups:
        raise UserError(f"model.experts={model.experts} must be a multiple of model.groups={model.groups}")
    if not 1 <= model.top_groups <= model.groups:
        raise UserError(f"model.top_groups={model.top_groups} must lie between 1 and model.groups={model.groups}")
    choosable = model.experts // model.groups * model.top_groups
    if model.top_k > choosable:
        raise UserError(f"model.top_k={model.top_k} is more than the {choosable} experts a token can choose from")
    if model.first_dense_layers > model.layers:
        raise UserError(f"model.first_dense_layers={model.first_dense_layers} is more than model.layers={model.layers}")
    if model.first_dense_layers and model.ffn < 1:
        raise UserError(f"model.first_dense_layers={model.first_dense_layers} needs model.ffn, the dense layers' width")
    if model.shared_gate and not shared_width(model):
        raise UserError("model.shared_gate=true needs shared experts (model.shared_experts or model.shared_ffn)")


def shared_width(model: ModelConfig) -> int:
    """Width of all shared experts together; 0 where there are none."""
    return model.shared_ffn if model.shared_ffn is not None else model.shared_experts * model.expert_ffn
