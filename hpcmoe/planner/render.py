"""A plan as a person reads it in a terminal: layout on nodes and GPUs, memory bar, time by part, alternatives, assumptions.

Text from a Plan; decides nothing. Needs rich.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpcmoe.planner import flops
from hpcmoe.planner.comm import in_node
from hpcmoe.planner.constants import MARGIN
from hpcmoe.planner.explain import GIB, PART_WORDS, bottleneck, loses
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.stages import contents

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hpcmoe.planner.plan import Plan

MEMORY_KINDS = (
    ("params", "parameters", "blue"),
    ("grads", "gradients", "cyan"),
    ("optimizer", "optimizer", "magenta"),
    ("activations", "activations", "yellow"),
    ("buffers", "buffers", "red"),
)
STAGES_DRAWN = 4


def gpu_label(plan: Plan, stage_rank: int) -> str:
    """What one rank of a pipeline stage is: its data-parallel, tensor-parallel and expert places."""
    layout, shape = plan.layout, plan.shape
    words = [f"d{stage_rank // layout.tp}"]
    if layout.tp > 1:
        words.append(f"t{stage_rank % layout.tp}")
    if shape.experts:
        each = shape.experts // layout.ep
        first = stage_rank // layout.ep_stride % layout.ep * each
        words.append(f"e{first}" if each == 1 else f"e{first}-{first + each - 1}")
    return " ".join(words)


def layout_lines(plan: Plan) -> list[str]:
    """The stages, and the GPUs of each one's first node; d: data rank, t: tensor rank, e: experts."""
    layout, g = plan.layout, plan.machine.gpus_per_node
    per_stage = layout.world // layout.pp
    drawn = list(range(layout.pp)) if layout.pp <= STAGES_DRAWN else [0, 1, layout.pp - 1]
    ranks = contents(plan.shape, layout, plan.work.seq, even=not plan.work.own)
    lines = []
    for stage in drawn:
        if stage == layout.pp - 1 and layout.pp > STAGES_DRAWN:
            lines.append(f"  ... {layout.pp - 3} more stages like these")
        chunks = ranks[stage]
        dense, moe = sum(c.dense for c in chunks), sum(c.moe for c in chunks)
        first, last = stage * per_stage // g, ((stage + 1) * per_stage - 1) // g
        where = f"node {first}" if first == last else f"nodes {first}-{last}"
        here = (("embedding", any(c.first for c in chunks)), ("head", any(c.last for c in chunks)))
        ends = [name for name, holds in here if holds]
        layers = f"{moe + dense} layers" + (f" ({dense} dense)" if dense else "") + "".join(f" + {end}" for end in ends)
        shown = min(g, per_stage)
        boxes = " ".join(f"[{gpu_label(plan, rank)}]" for rank in range(shown))
        name = f"stage {stage}" if layout.pp > 1 else "all"
        lines.append(f"  {name:8} {where:13} {boxes}{' ...' if per_stage > shown else ''}   {layers}")
    return lines


def placement(layout: Layout, gpus_per_node: int) -> str:
    if layout.ep == 1:
        return "every rank holds all experts"
    local = in_node(layout.ep, layout.ep_stride, gpus_per_node)
    if local == layout.ep:
        return f"EP {layout.ep} lies inside a node: the all-to-all uses NVLink"
    text = f"EP {layout.ep} spans {layout.ep // local} nodes: the all-to-all crosses the network"
    if layout.ep_placement == "across":
        shards = in_node(layout.efsdp, 1, gpus_per_node)
        where = "inside a node" if shards == layout.efsdp else f"{shards} to a node"
        text += f"; each expert's {layout.efsdp} shards lie {where} (ep_placement=across)"
    return text


def memory_bar(plan: Plan, width: int = 60) -> str:
    """A bar of the limit (rich markup); each kind has a colour, the rest is free."""
    memory = plan.best.memory
    scale = max(plan.limit or memory.total, memory.total)
    bar, drawn = "", 0
    so_far = 0.0
    for name, _, colour in MEMORY_KINDS:
        so_far += getattr(memory, name)
        cells = round(so_far / scale * width) - drawn
        bar += f"[{colour}]{'█' * cells}[/]"
        drawn += cells
    return bar + "[dim]" + "░" * max(0, width - drawn) + "[/]"


def _nodes(count: int) -> str:
    return f"{count} node" + ("" if count == 1 else "s")


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e8 else f"{number / 1e6:,.2f} M"


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= 0.1 * GIB else f"{number / 2**20:.1f} MiB"


def show(plan: Plan, console: Console, explained: bool) -> None:
    """Print the whole plan."""
    layout, machine, work = plan.layout, plan.machine, plan.work
    console.print(
        f"[bold]{plan.shape.name}[/] on [bold]{machine.name}[/], {_nodes(plan.nodes)} x {machine.gpus_per_node} {machine.gpu}: "
        f"{_count(plan.params.total)} parameters, {_count(plan.params.active)} active, {work.precision}, "
        f"{work.seq:,} tokens x {work.batch:,} sequences a step"
    )
    if plan.fits:
        chosen = "given" if plan.given else "chosen"
        console.print(f"\n[bold green]{layout.describe()}[/]  ({chosen})  {_details(layout)}")
    else:
        console.print("")
    for reason in plan.impossible:
        console.print(f"[bold red]impossible:[/] {reason}")
    for line in layout_lines(plan):
        console.print(line, highlight=False, markup=False)
    if plan.shape.experts:
        console.print(f"  {placement(layout, machine.gpus_per_node)}")
    _show_memory(plan, console)
    if plan.fits and plan.best.step is not None:
        _show_time(plan, console)
    console.print(f"\n[bold]queue[/]  {_queue(plan)}")
    if plan.others:
        console.print(f"\n[bold]alternatives[/] ({plan.examined} layouts costed)")
        console.print(_alternatives(plan, 5 if explained else 3))
    if explained:
        for line in reasons(plan):
            console.print(f"  - {line}")
    console.print("\n[bold]taken on trust[/]")
    shown = plan.assumptions if explained else plan.assumptions[:4]
    for text in shown:
        console.print(f"  - {text}", highlight=False)
    if len(shown) < len(plan.assumptions):
        console.print(f"  - {len(plan.assumptions) - len(shown)} more with --explain")


def _details(layout: Layout) -> str:
    schedule = f"{layout.schedule}, " if layout.pp > 1 else ""
    return f"{schedule}microbatch {layout.microbatch}, recompute {layout.recompute}, world {layout.world}"


def _queue(plan: Plan) -> str:
    queue = plan.queue
    words = [f"{k}={v}" for k, v in (("partition", queue.partition), ("qos", queue.qos), ("time", queue.time)) if v]
    return f"{' '.join(words) or 'none'}  ({queue.rule})"


def _show_memory(plan: Plan, console: Console) -> None:
    memory = plan.best.memory
    limit = "(its limit is not on record)" if plan.limit is None else f"of {_size(plan.limit)} (plans keep {MARGIN:.0%} free)"
    console.print(f"\n[bold]memory[/] on the fullest GPU: {_size(memory.total)} {limit}")
    console.print(f"  {memory_bar(plan)}")
    kinds = "  ".join(f"[{colour}]█[/] {word} {_size(getattr(memory, name))}" for name, word, colour in MEMORY_KINDS)
    console.print(f"  {kinds}", highlight=False)


def _show_time(plan: Plan, console: Console) -> None:
    step = plan.best.step
    assert step is not None, "caller checked"
    per_gpu, hours = plan.tokens_per_s or 0.0, plan.gpu_hours_per_billion or 0.0
    total_flops = flops.titan_flops(plan.shape, plan.work.seq) / 1e9
    console.print(
        f"\n[bold]speed[/]  {per_gpu:,.0f} tokens/s/GPU, {per_gpu * plan.layout.world:,.0f} in all; step {step.total:.2f} s; "
        f"{hours:,.1f} GPU-hours a billion tokens"
    )
    if plan.mfu is not None:
        megatron = flops.megatron_flops(plan.shape, plan.work.seq) / 1e9
        console.print(
            f"  MFU {plan.mfu:.1%} of {plan.peak_tflops:g} TFLOP/s ({plan.work.precision}, titan convention, "
            f"{total_flops:.2f} GFLOP/token; megatron convention: {plan.mfu * megatron / total_flops:.1%}, {megatron:.2f})"
        )
    parts = sorted(step.parts().items(), key=lambda item: -item[1])
    for name, value in parts:
        share = value / step.total
        if share >= 0.005:
            console.print(f"  {PART_WORDS[name]:30} {share:6.1%}  {'▇' * max(1, round(share * 40))}", highlight=False)
    console.print(
        f"  checkpoint {plan.checkpoint_bytes / GIB:,.1f} GiB, about {plan.checkpoint_s:,.0f} s in the background",
        highlight=False,
    )


def _alternatives(plan: Plan, count: int) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 1))
    for column in ("layout", "microbatch", "recompute", "memory", "tokens/s/GPU", "loses"):
        table.add_column(column, justify="right" if column in ("memory", "tokens/s/GPU") else "left")
    for c in plan.others[:count]:
        speed = f"{c.tokens_per_s:,.0f}" if c.fits and c.tokens_per_s else "-"
        memory = _size(c.memory.total)
        table.add_row(c.layout.describe(), str(c.layout.microbatch), c.layout.recompute, memory, speed, loses(plan.best, c))
    return table


def reasons(plan: Plan) -> list[str]:
    """Why this layout: what limits it, and the ceilings it stands under."""
    layout, out = plan.layout, []
    step = plan.best.step if plan.fits else None
    part = bottleneck(step)
    if step is not None and part is not None:
        out.append(f"most of the step is {PART_WORDS[part]} ({step.parts()[part] / step.total:.0%})")
        moved = sum(step.parts()[name] for name in ("tensor_parallel", "all_to_all", "fsdp", "pipeline_transfer")) / step.total
        out.append(f"transfers that nothing hides take {moved:.0%}; the pipeline waits {step.pipeline_bubble / step.total:.0%}")
        out.append(f"{step.microbatches} microbatches a step" + (f" through {layout.pp} stages" if layout.pp > 1 else ""))
    if plan.wire_ceiling is not None:
        out.append(f"the network alone keeps EP {layout.ep} below {plan.wire_ceiling:,.0f} tokens/s/GPU")
    turned = replace(layout, ep_placement="inside" if layout.ep_placement == "across" else "across")
    other = next((c for c in plan.others if c.layout == turned), None)
    if other is not None:
        out.append(f"EP {layout.ep} {layout.ep_placement}; placed {turned.ep_placement} instead: {loses(plan.best, other)}")
    if layout.recompute != "none":
        out.append(f"recompute {layout.recompute}: without it the layout does not fit")
    cell = plan.machine.cell_nodes
    if cell is not None:
        inside = "fits in one cell" if plan.nodes <= cell else "spans cells"
        out.append(f"{_nodes(plan.nodes)}: the job {inside} of the network ({cell} nodes a cell)")
    return out


def range_table(plans: list[Plan | tuple[int, str]]) -> Table:
    """One line a node count; a refusal keeps its reason."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 1))
    for column in ("nodes", "GPUs", "layout", "GiB", "tokens/s/GPU", "tokens/s", "MFU", "GPU-h / B tokens", "queue"):
        table.add_column(column, justify="left" if column in ("layout", "queue") else "right")
    for plan in plans:
        if isinstance(plan, tuple):
            table.add_row(str(plan[0]), "", f"refused: {plan[1]}")
            continue
        world = plan.layout.world
        if not plan.fits or plan.tokens_per_s is None:
            why = "speed not on record" if plan.fits else "impossible: memory"
            table.add_row(
                str(plan.nodes), str(world), why, f"{plan.best.memory.total / GIB:.1f}", "", "", "", "", _short_queue(plan)
            )
            continue
        table.add_row(
            str(plan.nodes),
            str(world),
            plan.layout.describe(),
            f"{plan.best.memory.total / GIB:.1f}",
            f"{plan.tokens_per_s:,.0f}",
            f"{plan.tokens_per_s * world:,.0f}",
            f"{plan.mfu or 0:.1%}",
            f"{plan.gpu_hours_per_billion or 0:,.1f}",
            _short_queue(plan),
        )
    return table


def _short_queue(plan: Plan) -> str:
    return plan.queue.qos or plan.queue.partition or "-"
