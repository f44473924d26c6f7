"""Published measurements (tests/data/published.yaml) as the planner's inputs: what was run, on what, and what came out.

Used by the accuracy benchmark and the tests, never by a plan. Rows without a layout are read but say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcmoe.planner.flops import megatron_2021_flops, megatron_flops, titan_flops
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.machine import Machine
from hpcmoe.planner.shapes import MlaShape, Shape
from hpcmoe.planner.workload import Workload


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


# Machines of the published rows: (GPU, GPUs a node, peak TFLOP/s bf16, HBM, NVLink, network a GPU; bytes/s, one way)
_MACHINES: dict[str, tuple[str, int, float, float, float, float]] = {
    "a100": ("A100-SXM4", 8, 312.0, 2.039e12, 300e9, 25e9),
    "a800": ("A800", 8, 312.0, 2.039e12, 200e9, 12.5e9),
    "h100": ("H100-SXM5", 8, 989.0, 3.35e12, 450e9, 50e9),
    "h800": ("H800", 8, 989.0, 3.35e12, 200e9, 50e9),
    "gh200": ("GH200-H100-96", 4, 989.4, 4.0e12, 450e9, 25e9),
    "mi250x_gcd": ("MI250X-GCD", 8, 191.5, 1.638e12, 200e9, 12.5e9),
    "gb200": ("GB200", 4, 2500.0, 8.0e12, 900e9, 50e9),
}


def machine_of(row: dict[str, Any]) -> Machine:
    """The machine a row ran on; memory as printed (GB on the label are GiB on the card, a little less usable)."""
    gpu, per_node, peak, hbm, nvlink, network = _MACHINES[row["gpu"]]
    label = float(row.get("gpu_mem_gb", 80))
    if row["gpu"] == "a100" and label == 40:
        hbm = 1.555e12
    if row["gpu"] == "h100" and label in (95, 96):  # TorchTitan's: a 500 W variant with HBM2e; clocks go as the root of power
        peak, hbm = peak * (500 / 700) ** 0.5, 2.0e12
    usable = {96.0: 95.0, 95.0: 94.0}.get(label, label * 0.99)
    network = row.get("net_gbytes_per_gpu", network / 1e9) * 1e9
    fp8 = None if row["gpu"] in ("a100", "a800", "mi250x_gcd") else 2 * peak
    peaks = {"bf16": peak, "fp8": fp8}
    return Machine(row["gpu"], gpu, per_node, usable * 2**30, peaks, hbm, nvlink, network * per_node)


def _gpus_in(text: str) -> int | None:
    return int(text.split("(")[1].rstrip(")")) if "(" in text else None


def _recompute(row: dict[str, Any]) -> str:
    word = str(row.get("recompute", "none"))
    if row["id"] == "dsv3-train":
        return "selective"  # DeepSeek-V3 report, from memory: RMSNorm and MLA up-projections
    if word in ("full", "none"):
        return word
    if "layernorm,moe" in word:
        return "selective_moe"
    titan = "fsdp" in row or row.get("framework") == "titan"
    return "selective_op" if titan else "selective"


# Layouts that a table's text gives for rows which do not repeat them (folding paper: the same layout as its main table)
_INFERRED = {
    ("mixtral-8x22B", "MCore+Folding"): {"tp": 2, "ep": 8, "pp": 8},
    ("qwen2-57B-A14B", "MCore+Folding"): {"tp": 2, "ep": 4, "pp": 4},
    ("mixtral-8x22B-G8T8", "MCore+Folding"): {"tp": 4, "ep": 8, "pp": 8},
}


@dataclass(frozen=True)
class Case:
    """One row as the planner sees it. ``measured``: tokens/s/GPU, None when it ran out of memory or was not printed."""

    id: str
    table: str
    family: str
    shape: Shape
    machine: Machine
    layout: Layout
    work: Workload
    measured: float | None
    peak_gib: float | None
    out_of_memory: bool
    inferred: bool


def _family(row: dict[str, Any], shape: Shape) -> str:
    kind = "MoE" if shape.experts else "dense"
    gpu = {"a100": "A100", "a800": "A100", "gh200": "GH200", "h100": "H100", "h800": "H100"}.get(row["gpu"], row["gpu"])
    return f"{kind} {gpu}"


def tokens_per_s(row: dict[str, Any], shape: Shape, machine: Machine) -> float | None:
    """Measured tokens/s/GPU: as printed, or from the iteration time, TFLOP/s or MFU in the row's own convention."""
    if row.get("status"):
        return None
    if "tok_s_gpu" in row:
        return float(row["tok_s_gpu"])
    if "iter_s" in row and "gbs" in row:
        return float(row["gbs"] * row["seq"] / row["iter_s"] / row["gpus"])
    convention = str(row.get("flops_convention", ""))
    if row["id"].startswith("fold"):
        per_token = titan_flops(shape, row["seq"])  # Megatron-Core of 2024: attention over the full square
    elif convention.startswith("megatron2021"):
        per_token = megatron_2021_flops(shape, row["seq"])
    elif convention.startswith("titan"):
        per_token = titan_flops(shape, row["seq"])
    else:
        per_token = megatron_flops(shape, row["seq"])
    if "tflops_per_gpu" in row:
        return float(row["tflops_per_gpu"] * 1e12 / per_token)
    if "mfu_pct" in row:
        peak = machine.peak["bf16"]
        assert peak is not None
        return float(row["mfu_pct"] / 100 * peak * 1e12 / per_token)
    return None


def _layout(row: dict[str, Any], shape: Shape, gpus: int) -> tuple[Layout, bool] | None:
    spec = dict(row)
    inferred = False
    if row["id"].startswith("xmoe-a100"):
        spec.update({"tp": 1, "ep": 8, "mbs": 1})  # one node of 8; the microbatch is a guess
        inferred = True
    if "tp" not in spec:
        known = _INFERRED.get((row["model"], str(row.get("method"))))
        if known is None:
            return None
        spec.update(known)
        inferred = True
    method, framework = str(row.get("method", "")), str(row.get("framework", ""))
    pp, tp, cp, ep = spec.get("pp", 1), spec["tp"], spec.get("cp", 1), spec.get("ep", 1)
    dp = max(1, gpus // (pp * tp * cp))
    fsdp = "fsdp" in row or "FSDP" in method or "FSDP" in str(row.get("dispatcher", "")) or framework == "titan"
    zero = "zero2" if row.get("fsdp") == "SHARD_GRAD_OP" else "fsdp" if fsdp else "zero1"
    if row["id"].startswith("llama3-405B"):
        zero = "zero2"  # Llama 3 report, from memory: no resharding after the forward pass
    shard = _gpus_in(str(row.get("fsdp", ""))) or dp
    shard = min(shard, dp)
    vpp = spec.get("vpp", 1)
    if "vpp" not in spec and pp > 1 and (row["id"].startswith("llama3-405B") or method.startswith("MCore")):
        vpp, inferred = max(1, shape.layers // pp), True  # their texts: one layer a chunk
    if "vpp" not in spec and pp > 1 and row["id"].startswith("mcore-"):
        vpp, inferred = max(1, shape.layers // pp // 2), True
    schedule = "Interleaved1F1B" if vpp > 1 or row.get("schedule") == "Interleaved1F1B" else "1F1B"
    if framework == "titan" and pp > 1 and row.get("compile") is not None:
        schedule = "1F1B"
    if row.get("schedule") == "DualPipe":
        schedule = "DualPipeV"
    if schedule != "1F1B" and vpp == 1:
        vpp = 2
    microbatch = spec.get("mbs", 1)
    if pp > 1 and str(row.get("note", "")).startswith("local batch"):
        microbatch = max(1, row["mbs"] // pp)  # TorchTitan of 2024: as many microbatches as pipeline ranks
    if "local_batch" in row and (pp == 1 or framework == "megatron"):
        microbatch = row["local_batch"]
    folded = not (method == "MCore" or "TP+EP" in method)
    expert_tp = row.get("etp", 1 if folded or not shape.experts else tp)
    ep = min(ep, max(1, shape.experts)) if shape.experts else 1
    layout = Layout(
        pp=pp, dp_replicate=dp // shard, dp_shard=shard, tp=tp, ep=ep, schedule=schedule, microbatch=microbatch,
        recompute=_recompute(row), vstages=vpp, cp=cp, expert_tp=expert_tp, zero=zero,
    )  # fmt: skip
    return layout, inferred


def case_of(row: dict[str, Any], models: dict[str, dict[str, Any]]) -> Case | None:
    """A row with a layout as a planner's case; None when the row says too little to be predicted."""
    if row["gpu"] in ("gb200",) or row["model"] not in models:
        return None
    spec = dict(models[row["model"]])
    spec["layers"] = row.get("layers_override", spec["layers"])
    shape = shape_of(row["model"], spec)
    machine = machine_of(row)
    made = _layout(row, shape, row["gpus"])
    if made is None:
        return None
    layout, inferred = made
    batch = row.get("gbs")
    if batch is None and row["model"] == "deepseek-v3":
        batch, inferred = 15360, True  # DeepSeek-V3 report, from memory
    if batch is None and "tokens_per_batch" in row:
        batch = row["tokens_per_batch"] // row["seq"]
    if batch is None and "local_batch" in row:
        batch = row["local_batch"] * layout.dp
        if row["framework"] == "megatron":  # its rows give the microbatch; 64 sequences is what the pair 321801, 306176 implies
            batch, inferred = 64, True
    if batch is None and row["id"].startswith("xmoe-a100"):
        batch = 16 * layout.dp
    if batch is None and row["model"] == "skywork-moe-146B":
        batch, inferred = 48 * layout.dp, True
    if batch is None and "mbs" in row:
        batch = row["mbs"] * layout.dp
    if batch is None:
        return None
    table = row["src"].split(" ")[0]
    precision = "fp8" if "fp8" in str(row.get("precision", "")) else "bf16"
    routing, dispatcher = str(row.get("routing", "")), str(row.get("dispatcher", ""))
    unsaid = not routing and row["id"].startswith(("zoo-", "dsv3"))  # Megatron's tables force balance unless they say dropless
    balanced = row["id"].startswith("fold") or "forced" in routing or "drop_CF" in routing or unsaid
    unfused = row["id"].startswith(("meg21", "kort"))
    work = Workload(
        seq=row["seq"],
        batch=batch,
        precision=precision,
        reduce_bytes=2.0 if row.get("mp_mode") == "PURE" else 4.0,
        logit_bytes=4.0 if row["src"].startswith("llm_foundry") else 10.0,
        flash=not unfused,
        fused=row.get("framework", "megatron") == "megatron" and not row["src"].startswith(("llm_foundry", "torchtitan")),
        compiled=bool(row.get("compile")),
        sequence_parallel=not row["id"].startswith("meg21"),
        own=False,
        imbalance=not balanced,
        dedup="DeepEP" in dispatcher or "dsv3-train" in row["id"],
        overlap_tp=0.7 if row["id"].startswith("mcore-") or "AsyncTP" in row["id"] else 0.0,
        overlap_a2a=0.8 if "overlap" in dispatcher or row.get("schedule") == "DualPipe" else 0.0,
    )
    measured = tokens_per_s(row, shape, machine)
    return Case(
        row["id"], table, _family(row, shape), shape, machine, layout, work, measured,
        row.get("peak_mem_gib"), row.get("status") == "OOM", inferred,
    )  # fmt: skip
