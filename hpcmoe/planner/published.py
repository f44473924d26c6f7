"""Published measurements (tests/data/published.yaml) as the planner's inputs: what was run, on what, and what came out.

Used by the accuracy benchmark and the tests, never by a plan. Rows without a layout are read but say so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hpcmoe.planner.shapes import MlaShape, Shape


def read(path: Path) -> dict[str, Any]:
    """The file's parts: models, rows, memory_anchors, comm_anchors, meta."""
    with path.open(encoding="utf-8") as handle:
        data: dict[str, Any] = yaml.load(handle, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return data


def shape_of(name: str, spec: dict[str, Any]) -> Shape:
    """A published model's shape. Missing ``kv_heads`` means as many as heads; missing ``head_dim`` means hidden / heads."""
    heads = spec["heads"]
    mla = None
    if spec.get("attn") == "mla":
        mla = MlaShape(spec["kv_lora"], spec["q_lora"], spec["qk_nope"], spec["qk_rope"], spec["v_head"])
    experts = spec.get("experts", 0)
    return Shape(
        name=name,
        vocab=spec["vocab"],
        hidden=spec["hidden"],
        layers=spec["layers"],
        heads=heads,
        kv_heads=spec.get("kv_heads", heads),
        head_dim=spec.get("head_dim", spec["hidden"] // heads),
        mla=mla,
        ffn=spec.get("ffn", 0),
        mats=spec.get("ffn_mats", 3),
        dense_layers=spec.get("dense_layers", 0) if experts else spec["layers"],
        experts=experts,
        top_k=spec.get("topk", 0),
        expert_ffn=spec.get("moe_ffn", 0),
        shared_ffn=spec.get("shared_ffn", 0),
        tied=spec.get("tied", False),
        linear_bias=spec.get("bias", False),
        positions=spec.get("pos_emb", 0),
    )
