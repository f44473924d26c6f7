"""Why: what limits a layout, what the alternatives lose, what nobody has verified. Words from numbers; prints nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpcmoe.config.schema import Config
from hpcmoe.models.partition import SPLIT_BACKWARD
from hpcmoe.planner import provenance
from hpcmoe.planner.constants import FITTED, HOT_RANK, MARGIN, PADDING, gpu_speed
from hpcmoe.planner.flops import titan_flops
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.machine import Machine
from hpcmoe.planner.step import StepTime
from hpcmoe.planner.workload import Workload

if TYPE_CHECKING:
    from hpcmoe.planner.plan import Plan
    from hpcmoe.planner.search import Candidate, Search

GIB = 2**30
SHOWN = 5

PART_WORDS = {
    "matmul": "dense matmuls",
    "attention": "attention",
    "experts": "expert matmuls",
    "elementwise": "element-wise kernels (HBM)",
    "recompute": "recompute",
    "tensor_parallel": "tensor-parallel transfers",
    "all_to_all": "expert all-to-all",
    "fsdp": "FSDP transfers not hidden",
    "pipeline_bubble": "pipeline bubble",
    "pipeline_transfer": "pipeline transfers not hidden",
    "head": "output layer and loss",
    "optimizer": "optimizer",
}


def bottleneck(step: StepTime | None) -> str | None:
    """The part that takes most of the step."""
    if step is None:
        return None
    parts = step.parts()
    return max(parts, key=lambda name: parts[name])


def distinct(found: Iterable[Candidate], shown: int = SHOWN) -> list[Candidate]:
    """The nearest alternatives to the first: those that differ in a size, not only in microbatch or recompute; EP inside a
    node and across nodes both among them when both exist."""
    candidates = list(found)
    best, rest = candidates[0], candidates[1:]
    seen = {_sizes(best.layout)}
    out: list[Candidate] = []
    for candidate in rest:
        key = _sizes(candidate.layout)
        if key not in seen:
            seen.add(key)
            out.append(candidate)
    kept = out[:shown]
    other_ep = next((c for c in out[shown:] if c.layout.ep != best.layout.ep), None)
    if other_ep is not None and all(c.layout.ep == best.layout.ep for c in kept):
        kept[-1] = other_ep
    return kept


def _sizes(layout: Layout) -> tuple[int | str, ...]:
    return (layout.pp, layout.tp, layout.ep, layout.ep_placement, layout.dp_replicate)


def loses(best: Candidate, other: Candidate) -> str:
    """What an alternative loses on, in one phrase."""
    if not other.fits:
        return f"does not fit: {other.memory.total / GIB:.1f} GiB a GPU"
    if best.step is None or other.step is None or not best.tokens_per_s or not other.tokens_per_s:
        return "speed not known"
    change = other.tokens_per_s / best.tokens_per_s - 1
    mine, theirs = best.step, other.step
    deltas = {
        name: theirs.parts()[name] / theirs.total - mine.parts()[name] / mine.total * mine.total / theirs.total
        for name in mine.parts()
    }
    worst = max(deltas, key=lambda name: deltas[name])
    if change > 0.002:
        least = min(deltas, key=lambda name: deltas[name])
        return f"{change:+.1%}: less {PART_WORDS[least]}"
    if deltas[worst] < 0.002:
        return f"{change:+.1%}: as good"
    return f"{change:+.1%}: more {PART_WORDS[worst]}"


def too_big(search: Search, best: Candidate) -> str:
    """The memory limit that forbids the leanest layout, with the numbers and, if it helps, how many nodes would do."""
    assert search.limit is not None
    memory, usable = best.memory, search.limit * (1 - MARGIN)
    parts = {
        "optimizer": memory.optimizer, "parameters": memory.params, "gradients": memory.grads,
        "activations": memory.activations, "buffers": memory.buffers,
    }  # fmt: skip
    biggest = max(parts, key=lambda name: parts[name])
    what = "the given layout" if search.pins.names() else "the leanest layout"
    text = (
        f"memory: {what} ({best.layout.describe()}, microbatch {best.layout.microbatch}, recompute {best.layout.recompute}) "
        f"needs {memory.total / GIB:.1f} GiB on a GPU and {usable / GIB:.1f} GiB are usable; most of it is {biggest}, "
        f"{parts[biggest] / GIB:.1f} GiB"
    )
    enough = nodes_needed(search)
    return text + (f"; it fits on {enough} nodes" if enough else "")


def too_slow(plan: Plan, target_mfu: float) -> str | None:
    """The limit that keeps a plan below a wished MFU, with the numbers; None when it is met or nothing is known."""
    speed, per_token = plan.tokens_per_s, titan_flops(plan.shape, plan.work.seq)
    if speed is None or not plan.peak_tflops:
        return None
    needed = target_mfu * plan.peak_tflops * 1e12 / per_token
    if speed >= needed:
        return None
    wish = f"MFU {target_mfu:.0%} (titan, of {plan.peak_tflops:g} TFLOP/s) needs {needed:,.0f} tokens/s/GPU"
    if plan.wire_ceiling is not None and plan.wire_ceiling < needed:
        wire = (plan.machine.network_gpu or 0.0) / 1e9
        return f"wire: EP {plan.layout.ep} over {wire:g} GB/s a GPU cannot pass {plan.wire_ceiling:,.0f} tokens/s/GPU; {wish}"
    part = bottleneck(plan.best.step)
    words = PART_WORDS[part] if part else "nothing known"
    return f"speed: {wish}, and {plan.layout.describe()} reaches {speed:,.0f}; most of its step is {words}"


def nodes_needed(search: Search) -> int | None:
    """The first of 2, 4, 8, ... times the nodes on which something fits; None when the machine has not that many."""
    from hpcmoe.planner.search import Search as Again

    if search.pins.names():
        return None
    nodes = search.nodes * 2
    while nodes <= (search.machine.nodes or 4096) and nodes <= search.nodes * 64:
        if Again(search.shape, search.work, search.machine, nodes).anything_fits():
            return nodes
        nodes *= 2
    return None


def nothing_divides(search: Search) -> str:
    """Why no layout exists at all."""
    world, batch = search.world, search.work.batch
    given = "".join(f", layout.{name}={getattr(search.pins, name)}" for name in search.pins.names())
    return (
        f"no layout of {world} GPUs divides a global batch of {batch} sequences "
        f"(train.global_batch_tokens={batch * search.work.seq}, train.seq_len={search.work.seq}{given}); "
        "a batch that is a multiple of the data-parallel ranks would do"
    )


def assumptions(config: Config, machine: Machine, work: Workload, layout: Layout) -> list[str]:
    """Everything that this plan takes on trust."""
    cluster = config.cluster
    out = []
    unread = provenance.unverified(cluster)
    if unread:
        out.append(f"figures of {cluster.name} without a read source: {', '.join(unread)}")
    out += list(cluster.notes)
    if not machine.known:
        out.append(f"the speeds of {cluster.name} are not on record, so no time, tokens/s or MFU is named")
    else:
        speed = gpu_speed(machine.gpu, FITTED)
        text = f"{speed.gemm:.0%} of the bf16 peak in large matmuls, {speed.attention:.0%} in attention: "
        text += f"fitted on published {speed.family} runs"
        if speed.borrowed:
            text += f"; {machine.gpu} itself was never measured"
        out.append(text)
        out.append("kernels: PyTorch's own, no fused permutes; transfers at 78 % of NVLink and 85 % of the network")
    if machine.mem_bytes is None:
        out.append(f"the memory of {cluster.name} is not on record, so nothing is refused for it")
    if work.imbalance and config.model.experts:
        out.append(f"routing: the fullest expert rank holds {HOT_RANK:g} times the mean; worse routing may run out of memory")
    if work.padded:
        out.append(
            f"experts are padded to the fullest one of a rank (no fused grouped matmul on this GPU): {PADDING:g} times the rows"
        )
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        out.append(
            f"{layout.schedule}: waiting and memory follow PyTorch's own order of passes, but no published run checks them, "
            "and what two walks of the backward graph cost beyond one is not counted"
        )
    out.append("checkpoints: 1 GB/s written by each node, not measured")
    return out
