"""--verify: one rank really built by the engine, with fake tensors in a fake process group, and its bytes beside the plan's.

The only part of the planner that imports torch. Not a test of speed, and not of what the engine cannot build yet: it says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.planner.activations import layer_activations
from hpcmoe.planner.memory import Memories, state, unsharded
from hpcmoe.planner.plan import Plan, make
from hpcmoe.planner.search import Pins
from hpcmoe.planner.shapes import from_config

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hpcmoe.models.transformer import Transformer

TOLERANCE = 0.05


@dataclass(frozen=True)
class Kind:
    """Bytes of one kind on rank 0."""

    name: str
    planned: float
    built: float

    @property
    def error(self) -> float:
        return self.planned / self.built - 1 if self.built else float(self.planned != 0)


@dataclass(frozen=True)
class Verification:
    """What was compared. ``notes``: what the build is, and what it leaves unverified."""

    layout: str
    world: int
    kinds: tuple[Kind, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def total(self) -> Kind:
        return Kind("total", sum(k.planned for k in self.kinds), sum(k.built for k in self.kinds))

    @property
    def agrees(self) -> bool:
        return all(abs(kind.error) <= TOLERANCE for kind in (*self.kinds, self.total))

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "world_size": self.world,
            "agrees": self.agrees,
            "tolerance": TOLERANCE,
            "seconds": self.seconds,
            "bytes": {k.name: {"planned": k.planned, "built": k.built, "error": k.error} for k in (*self.kinds, self.total)},
            "notes": list(self.notes),
        }


def report(result: Verification) -> str:
    """The comparison as text."""
    lines = [f"rank 0 of {result.world}, {result.layout}: built in {result.seconds:.1f} s"]
    for kind in (*result.kinds, result.total):
        planned, built = kind.planned / 2**20, kind.built / 2**20
        lines.append(f"  {kind.name:12} planned {planned:12,.1f} MiB   built {built:12,.1f} MiB   {kind.error:+.2%}")
    lines.append("agrees within 5 %" if result.agrees else "DOES NOT AGREE within 5 %")
    return "\n".join([*lines, *(f"  - {note}" for note in result.notes)])


def verify(config: Config, plan: Plan) -> Verification:
    """Build rank 0 of the plan's layout, or of the nearest one that the engine has. Raises UserError where it has none."""
    from hpcmoe.models.support import unsupported_features

    begun = time.perf_counter()
    missing = unsupported_features(config.model)
    if missing:
        raise UserError(
            f"--verify: the engine has no {', '.join(missing)} yet, so {config.model.name} is planned but cannot be built"
        )
    buildable, notes = _buildable(config, plan)
    kinds = _compare(config, buildable)
    return Verification(
        buildable.layout.describe(), buildable.layout.world, tuple(kinds), tuple(notes), time.perf_counter() - begun
    )


def _buildable(config: Config, plan: Plan) -> tuple[Plan, list[str]]:
    """The plan itself when the engine can build it; else one without TP, PP and recompute on the same GPUs."""
    layout, notes = plan.layout, ["routing is balanced in the build; the plan adds the fullest rank's share on top"]
    notes.append("stand-ins: attention keeps q, k, v, output and log-sum-exp")
    if layout.tp == layout.pp == 1 and layout.recompute == "none":
        return plan, notes
    pins = Pins(tp=1, pp=1, ep=layout.ep, dp_replicate=1, microbatch=1, recompute="none")
    notes.append(
        f"the plan is {layout.describe()}, recompute {layout.recompute}; the engine builds TP 1, PP 1, recompute none: "
        "what TP, PP and recompute change is NOT verified"
    )
    return make(config, pins), notes


def _compare(config: Config, plan: Plan) -> list[Kind]:
    shape, layout = from_config(config.model), plan.layout
    work = replace(plan.work, imbalance=False, padded=False)
    values = Memories(shape, work).held_on(layout, 0)
    params, grads, optimizer = state(values, layout, work)
    dense, moe = (layer_activations(shape, work, layout, kind, "none").kept for kind in (False, True))
    activations = (shape.layers - shape.moe_layers) * dense + shape.moe_layers * moe
    with _fake_world(layout.world):
        model = _built(config, plan)
        built_params, built_optimizer = _state_bytes(model)
        built_unsharded = _unsharded_bytes(model, work.compute_bytes)
    saved = _saved_bytes(config, plan)
    return [
        Kind("params", params, built_params),
        Kind("grads", grads, built_params),  # a gradient has its parameter's shape and dtype
        Kind("optimizer", optimizer, built_optimizer),
        Kind("activations", activations, saved),
        Kind("unsharded", unsharded(values, layout, work), built_unsharded),
    ]


@contextmanager
def _fake_world(size: int) -> Iterator[None]:
    """A process group of ``size`` ranks in which collectives do nothing; this process is rank 0."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _built(config: Config, plan: Plan) -> Transformer:
    """The engine's own model and parallelization, on the meta device."""
    import torch

    from hpcmoe.engine.build import build_parts
    from hpcmoe.engine.support import Sizes

    layout = plan.layout
    sizes = Sizes(
        layout.dp_replicate, layout.dp_shard, layout.tp, layout.pp, layout.ep, layout.efsdp, plan.work.batch, layout.microbatch
    )
    return build_parts(config, sizes, torch.device("cpu"))[1].parts[0]


def _bytes(tensor: torch.Tensor) -> int:
    from torch.distributed.tensor import DTensor

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _state_bytes(model: nn.Module) -> tuple[float, float]:
    """(parameters, optimizer moments) that rank 0 keeps."""
    from torch.optim import AdamW

    from hpcmoe.engine.optimizer import named_moments

    moments = named_moments(
        model.named_parameters(), AdamW(model.parameters())
    )  # a fused one takes no meta tensors; the moments are the same
    params = sum(_bytes(p) for p in model.parameters())
    return float(params), float(sum(_bytes(t) for entry in moments.values() for name, t in entry.items() if name != "step"))


def _unsharded_bytes(model: Transformer, width: float) -> float:
    """Two gathered blocks, one block's gradients, the root's own parameters and the head's gradients, at compute width, and one
    block's gradients as they are reduced, in fp32; from what FSDP wraps."""

    def whole(module: nn.Module) -> float:
        from torch.distributed.tensor import DTensor, Shard

        total = 0.0
        for parameter in module.parameters():
            numel = float(parameter.numel())
            if isinstance(parameter, DTensor):  # gathering undoes FSDP's split; an ep axis stays split
                names = parameter.device_mesh.mesh_dim_names or ()
                for axis, placement in zip(names, parameter.placements, strict=True):
                    if axis == "ep" and isinstance(placement, Shard):
                        numel /= parameter.device_mesh[axis].size()
            total += numel
        return total

    block = max(whole(b) for b in model.layers.values())
    root = whole(model) - sum(whole(b) for b in model.layers.values())
    head = whole(model.head) if model.head is not None else 0.0
    return width * (3.0 * block + root + head) + 4.0 * block


def _saved_bytes(config: Config, plan: Plan) -> float:
    """Bytes that autograd keeps for one microbatch of all layers, from real blocks in the compute dtype."""
    model = config.model
    per_kind = {}
    for moe, layer in ((False, 0), (True, model.first_dense_layers)):
        count = model.layers - model.first_dense_layers if moe else model.first_dense_layers
        if count:
            per_kind[moe] = count * _block_bytes(config, plan, layer)
    return float(sum(per_kind.values()))


def _block_bytes(config: Config, plan: Plan, layer: int) -> float:
    """Bytes one of the engine's blocks saves on the meta device; its parameters are left out."""
    import torch

    from hpcmoe.models.attention import rope_tables
    from hpcmoe.models.experts import Experts
    from hpcmoe.models.transformer import Block

    layout, work, model = plan.layout, plan.work, config.model
    dtype = torch.float32 if work.compute_bytes == 4.0 else torch.bfloat16
    with torch.device("meta"):
        block = Block(model, layer)
        if block.moe is not None:  # what this rank keeps of the experts
            block.moe.experts = Experts(model.experts // layout.ep, model.hidden, model.expert_ffn)
            block.moe.kernel = "padded_bmm"  # grouped_mm keeps the same tensors, but has no meta kernel in fp32
        block.to(dtype)
        x = torch.empty(layout.microbatch, work.seq, model.hidden, dtype=dtype, requires_grad=True)
    weights = {p.untyped_storage()._cdata for p in block.parameters()}
    seen: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # a freed storage's address would be given to another

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    cos, sin = rope_tables(work.seq, model.head_dim, model.rope_theta, torch.device("meta"))
    with (
        _balanced_on_meta(layout.ep),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        block(x, cos, sin, 1.0)
    shared = {t.untyped_storage()._cdata for t in (cos, sin)}
    return float(sum(size for key, size in seen.items() if key not in shared))


@contextmanager
def _balanced_on_meta(ep: int) -> Iterator[None]:
    """Stand-ins for what has no shape without data (counts, dispatch) and for attention, which has no kernel on meta."""
    import torch
    import torch.nn.functional as F

    from hpcmoe.models import moe
    from hpcmoe.models.dispatch import Compute, RowLayout, gather_rows, scatter_rows

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            B, H, S, C = q.shape
            out = q.new_empty(B, S, H, C).transpose(1, 2)  # the layout of flash attention's output
            ctx.save_for_backward(q, k, v, out, q.new_empty(B, H, S, dtype=torch.float32))
            return out

    def run_experts(
        x: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, counts: torch.Tensor, compute: Compute, *_: Any
    ) -> Any:
        (T, K), local = experts_TK.shape, len(counts) // ep
        size = -(-T * K // local)
        rows = RowLayout([i * size for i in range(local)], [size] * local, counts.new_empty(local, dtype=torch.int32))
        place, padded = counts.new_empty(T * K), counts.new_empty(T * K)
        if ep == 1:
            y_PD = compute(scatter_rows(x, place, rows.total, K), rows)
            y_RD = y_PD
        else:
            sent = scatter_rows(x, place, T * K, K).clone()  # the all-to-all keeps nothing
            y_RD = gather_rows(compute(scatter_rows(sent, padded, rows.total), rows), padded).clone()
        y_TKD = gather_rows(y_RD, place).view(T, K, -1)
        return torch.bmm(weights_TK.to(y_TKD.dtype).unsqueeze(1), y_TKD).squeeze(1)

    def bincount(x: torch.Tensor, minlength: int = 0) -> torch.Tensor:
        return x.new_empty(minlength)

    stand_ins: list[tuple[Any, str, Any]] = [
        (F, "scaled_dot_product_attention", lambda q, k, v, **_: Flash.apply(q, k, v)),
        (moe, "run_experts", run_experts),
        (torch, "bincount", bincount),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    try:
        for owner, name, stand_in in stand_ins:
            setattr(owner, name, stand_in)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
