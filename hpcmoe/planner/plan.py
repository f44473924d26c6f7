"""A plan: the layout chosen or given, what follows from it, and what is not known. The planner's only result type.

Made by ``make``; printed by render.py. Reads a Config and nothing else: no files, no Slurm, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hpcmoe.config.precision import precision_of
from hpcmoe.config.schema import Config, Precision
from hpcmoe.errors import UserError
from hpcmoe.models.partition import SCHEDULES, schedule_violation
from hpcmoe.planner import explain, flops, qos
from hpcmoe.planner.comm import wire_ceiling
from hpcmoe.planner.constants import FITTED, gpu_speed
from hpcmoe.planner.layout import RECOMPUTE, Layout, stage_chunks, violations
from hpcmoe.planner.machine import Machine, from_cluster
from hpcmoe.planner.params import ModelParams, model_params
from hpcmoe.planner.search import Candidate, Pins, Search, limit_bytes
from hpcmoe.planner.shapes import Shape, from_config
from hpcmoe.planner.workload import Workload

CHECKPOINT_RATE = 1e9  # bytes/s a node writes to a parallel file system, not measured anywhere yet
GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """``best`` is the chosen or given layout; ``others`` are alternatives, best first."""

    shape: Shape
    params: ModelParams
    work: Workload
    machine: Machine
    nodes: int
    best: Candidate
    others: tuple[Candidate, ...]
    given: tuple[str, ...]  # layout fields that the user fixed
    fits: bool
    impossible: tuple[str, ...]
    limit: float | None  # bytes a process may allocate on one GPU
    peak_tflops: float | None
    wire_ceiling: float | None  # tokens/s/GPU that the network cannot exceed in this layout
    queue: qos.Queue
    assumptions: tuple[str, ...]
    examined: int

    @property
    def layout(self) -> Layout:
        return self.best.layout

    @property
    def tokens_per_s(self) -> float | None:
        """Per GPU; None where the layout is impossible or the machine's speeds are not known."""
        return self.best.tokens_per_s if self.fits else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization by TorchTitan's convention, of ``peak_tflops``."""
        speed = self.tokens_per_s
        if speed is None or not self.peak_tflops:
            return None
        return speed * flops.titan_flops(self.shape, self.work.seq) / (self.peak_tflops * 1e12)

    @property
    def gpu_hours_per_billion(self) -> float | None:
        speed = self.tokens_per_s
        return None if speed is None else 1e9 / speed / 3600

    @property
    def checkpoint_bytes(self) -> float:
        """Every parameter's value and its two moments."""
        return float(self.params.total * (self.work.param_bytes + self.work.optim_bytes))

    @property
    def checkpoint_s(self) -> float:
        return self.checkpoint_bytes / (CHECKPOINT_RATE * self.nodes)


def workload(config: Config) -> Workload:
    """What the run computes a step. Raises UserError when the batch is not whole sequences."""
    train, precision, name = config.train, config.precision, precision_of(config)
    if train.global_batch_tokens % train.seq_len:
        raise UserError(
            f"train.global_batch_tokens={train.global_batch_tokens} is not a multiple of train.seq_len={train.seq_len}"
        )
    return Workload(
        seq=train.seq_len,
        batch=train.global_batch_tokens // train.seq_len,
        precision=name.value,
        optim_bytes=4.0 if precision.moments == "bf16" else 8.0,
        compute_bytes=4.0 if name is Precision.fp32 else 2.0,
        reduce_bytes=2.0 if precision.reduce == "bf16" else 4.0,
        padded=config.cluster.device == "cuda" and gpu_speed(config.cluster.gpu.model, FITTED).family == "A100",
    )


def _check_words(pins: Pins) -> None:
    for name, word, valid in (("schedule", pins.schedule, SCHEDULES), ("recompute", pins.recompute, RECOMPUTE)):
        if word is not None and word not in valid:
            raise UserError(f"layout.{name}={word!r} is not one of {', '.join(valid)}")


def _check_precision(config: Config) -> None:
    gpu = config.cluster.gpu
    if config.precision.name is Precision.fp8 and gpu.peak_tflops.get("fp8") is None:
        raise UserError(f"precision=fp8: {gpu.model} ({config.cluster.name}) has no FP8 units; use precision=bf16")


def _check_pins(search: Search) -> None:
    """What forbids the given sizes whatever the free ones are. Raises UserError, one line."""
    pins, world = search.pins, search.world
    _check_words(pins)
    sizes = {name: getattr(pins, name) for name in ("pp", "dp_replicate", "dp_shard", "tp") if getattr(pins, name)}
    trial = Layout(pp=pins.pp or 1, tp=pins.tp or 1, ep=pins.ep or 1)
    trial = replace(trial, dp_shard=pins.dp_shard or pins.ep or 1)
    if pins.dp_shard is None and pins.tp and pins.ep:
        trial = replace(trial, dp_shard=max(1, pins.ep // pins.tp) * pins.tp)
    problems = violations(search.shape, trial, search.machine, search.work.seq)
    if problems:
        raise UserError(problems[0])
    product = 1
    for size in sizes.values():
        product *= size
    if world % product or (len(sizes) == 4 and product != world):
        words = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise UserError(f"layout: {words} = {product} does not make the {world} GPUs of nodes={search.nodes}")


def _nothing(search: Search) -> str:
    """Why the search found no layout at all; the first rule that the given sizes break, where they are all given."""
    pins = search.pins
    if None not in (pins.pp, pins.tp, pins.ep, pins.dp_shard, pins.dp_replicate, pins.microbatch):
        schedule = pins.schedule or "1F1B"
        layout = Layout(
            pp=pins.pp or 1, dp_replicate=pins.dp_replicate or 1, dp_shard=pins.dp_shard or 1, tp=pins.tp or 1, ep=pins.ep or 1,
            schedule=schedule, microbatch=pins.microbatch or 1, vstages=stage_chunks(schedule, pins.pp or 1),
        )  # fmt: skip
        problems = violations(search.shape, layout, search.machine, search.work.seq)
        microbatches, rest = divmod(search.work.batch, layout.dp * layout.microbatch)
        refused = None if rest else schedule_violation(schedule, layout.pp, microbatches)
        if problems or refused:
            return problems[0] if problems else refused or ""
    return explain.nothing_divides(search)


def make(config: Config, pins: Pins | None = None, target_mfu: float | None = None) -> Plan:
    """The best layout for a config, or the given one costed. UserError for what cannot be asked; ``fits`` says the rest.

    ``target_mfu``: a wish (TorchTitan's convention); where it cannot be met, ``impossible`` says which limit forbids it.
    """
    _check_precision(config)
    shape, work = from_config(config.model), workload(config)
    machine = from_cluster(config.cluster, config.gpus_per_node)
    if config.cluster.nodes is not None and config.nodes > config.cluster.nodes:
        raise UserError(f"nodes={config.nodes}: {config.cluster.name} has {config.cluster.nodes}")
    queue = qos.choose(config.cluster, config.slurm, config.nodes)
    search = Search(shape, work, machine, config.nodes, pins)
    _check_pins(search)
    found = search.run()
    if not found:
        raise UserError(_nothing(search))
    best = found[0]
    impossible = () if best.fits else (explain.too_big(search, best),)
    placed = _other_placement(search, best)
    others = explain.distinct(found) if not search.pins.names() else _unpinned(search, best)
    others = [*others, *(c for c in placed if all(c.layout != other.layout for other in others))]
    plan = Plan(
        shape=shape,
        params=model_params(shape),
        work=work,
        machine=machine,
        nodes=config.nodes,
        best=best,
        others=tuple(others),
        given=tuple(search.pins.names()),
        fits=best.fits,
        impossible=impossible,
        limit=limit_bytes(machine),
        peak_tflops=machine.peak.get(work.precision),
        wire_ceiling=wire_ceiling(
            shape.moe_layers, shape.hidden, shape.top_k, best.layout.ep, machine, stride=best.layout.ep_stride
        ),
        queue=queue,
        assumptions=tuple(explain.assumptions(config, machine, work, best.layout)),
        examined=search.examined,
    )
    short = explain.too_slow(plan, target_mfu) if target_mfu is not None else None
    return plan if short is None else replace(plan, impossible=(*plan.impossible, short))


def best_candidate(config: Config, pins: Pins) -> Candidate | None:
    """The best layout under some pins and nothing else of a plan; None when no layout divides. Unchecked."""
    machine = from_cluster(config.cluster, config.gpus_per_node)
    found = Search(from_config(config.model), workload(config), machine, config.nodes, pins).run()
    return found[0] if found else None


def _other_placement(search: Search, best: Candidate) -> list[Candidate]:
    """The best layout with its ep group placed the other way, where that makes a difference."""
    if not best.layout.placement_matters(search.machine.gpus_per_node):
        return []
    other = "inside" if best.layout.ep_placement == "across" else "across"
    return [search.candidate(replace(best.layout, ep_placement=other))]


def _unpinned(search: Search, best: Candidate) -> list[Candidate]:
    """What the planner itself would have chosen beside a given layout."""
    free = Search(search.shape, search.work, search.machine, search.nodes)
    return [c for c in explain.distinct([best, *free.run()]) if c.layout != best.layout]


def to_json(plan: Plan) -> dict[str, Any]:
    """The document of ``hpcmoe plan --json``; sizes in GiB, speeds per GPU, None where not known."""
    layout, memory = plan.layout, plan.best.memory
    step = plan.best.step if plan.fits else None
    return {
        "model": plan.shape.name,
        "cluster": plan.machine.name,
        "nodes": plan.nodes,
        "layout": layout_json(layout),
        "world_size": layout.world,
        "fits": plan.fits,
        "impossible": list(plan.impossible),
        "memory_gib": {
            "params": memory.params / GIB,
            "grads": memory.grads / GIB,
            "optimizer": memory.optimizer / GIB,
            "activations": memory.activations / GIB,
            "buffers": memory.buffers / GIB,
            "total": memory.total / GIB,
            "limit": None if plan.limit is None else plan.limit / GIB,
        },
        "params_billion": {"total": plan.params.total / 1e9, "active": plan.params.active / 1e9},
        "gflop_per_token": {
            "titan": flops.titan_flops(plan.shape, plan.work.seq) / 1e9,
            "megatron": flops.megatron_flops(plan.shape, plan.work.seq) / 1e9,
        },
        "step_time_s": None if step is None else step.total,
        "step_parts_s": None if step is None else step.parts(),
        "tokens_per_s_per_gpu": plan.tokens_per_s,
        "mfu": plan.mfu,
        "flops_convention": "titan",
        "peak_tflops": plan.peak_tflops,
        "precision": plan.work.precision,
        "bottleneck": explain.bottleneck(step),
        "wire_ceiling_tokens_per_s_per_gpu": plan.wire_ceiling,
        "gpu_hours_per_billion_tokens": plan.gpu_hours_per_billion,
        "seq_len": plan.work.seq,
        "global_batch_tokens": plan.work.seq * plan.work.batch,
        "checkpoint": {"gib": plan.checkpoint_bytes / GIB, "seconds": plan.checkpoint_s},
        "slurm": {"partition": plan.queue.partition, "qos": plan.queue.qos, "time": plan.queue.time},
        "alternatives": [
            {
                "layout": layout_json(c.layout),
                "fits": c.fits,
                "memory_gib": c.memory.total / GIB,
                "tokens_per_s_per_gpu": c.tokens_per_s if c.fits else None,
                "loses": explain.loses(plan.best, c),
            }
            for c in plan.others
        ],
        "assumptions": list(plan.assumptions),
    }


def layout_json(layout: Layout) -> dict[str, Any]:
    names = ("pp", "dp_replicate", "dp_shard", "tp", "ep", "ep_placement", "schedule", "microbatch", "recompute")
    return {name: getattr(layout, name) for name in names}
