"""Moving tokens to their experts and back: permutation, all-to-all over the ep group, padding. No weights, no routing decisions.

Shapes: T tokens, K chosen experts, D hidden, E experts, R rows (token-expert pairs on a rank), P rows after padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpcmoe.models.recompute import decided, exchanged


@dataclass(frozen=True)
class RowLayout:
    """Where each local expert's rows lie in the padded buffer: expert e owns rows [starts[e], starts[e] + sizes[e])."""

    starts: list[int]
    sizes: list[int]  # padded
    ends_E: torch.Tensor  # int32 on the device: running sum of sizes, what grouped_mm reads

    @property
    def total(self) -> int:
        return self.starts[-1] + self.sizes[-1]


def layout_rows(counts: list[int], multiple: int, same_size: bool, device: torch.device) -> RowLayout:
    """Round each expert's row count up to ``multiple``; ``same_size``: all as large as the largest (for bmm). Never empty."""
    sizes = [-(-count // multiple) * multiple for count in counts]
    if same_size:
        sizes = [max(multiple, *sizes)] * len(sizes)
    elif sum(sizes) == 0:
        sizes[0] = multiple  # zero rows would leave the weights out of the graph on this rank only
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    ends = torch.tensor([start + size for start, size in zip(starts, sizes, strict=True)], dtype=torch.int32)
    return RowLayout(starts, sizes, ends.to(device))


class _Scatter(torch.autograd.Function):
    """out[place[i]] = x[i // repeat], zeros elsewhere. ``place`` has no duplicates, so backward is a gather: deterministic."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: torch.Tensor, rows: int, repeat: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.repeat = repeat
        source = x if repeat == 1 else x.repeat_interleave(repeat, dim=0)
        return x.new_zeros(rows, x.shape[1]).index_copy_(0, place, source)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        picked = grads[0].index_select(0, place)
        if ctx.repeat > 1:
            picked = picked.view(-1, ctx.repeat, picked.shape[1]).sum(1)
        return picked, None, None, None


class _Gather(torch.autograd.Function):
    """out[i] = x[place[i]], the inverse of _Scatter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.rows = x.shape[0]
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, place, grad), None


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks and, in backward, their gradients back. Uneven and zero splits are fine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return exchanged(lambda: exchange(x, receive, send, group))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return exchange(grads[0], ctx.send, ctx.receive, ctx.group), None, None, None


def exchange(x: torch.Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send ``send[r]`` consecutive rows to rank r of ``group``; the rows received, in rank order. No gradient."""
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def scatter_rows(x: torch.Tensor, place: torch.Tensor, rows: int, repeat: int = 1) -> torch.Tensor:
    return _Scatter.apply(x, place, rows, repeat)


def gather_rows(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return _Gather.apply(x, place)


def sorted_places(expert_R: torch.Tensor) -> torch.Tensor:
    """place[i]: where row i stands when the rows are sorted by expert; rows of one expert keep their order."""
    order = expert_R.argsort(stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def block_places(counts: list[list[int]], layout: RowLayout, device: torch.device) -> torch.Tensor:
    """Padded place of each row of a buffer that lies as blocks [source][expert] with ``counts[source][expert]`` rows each.

    Example, two sources, two experts, counts [[1, 2], [3, 0]], sizes padded to 4: rows of expert 0 are buffer rows 0, 3, 4, 5
    and go to 0 1 2 3; rows of expert 1 are buffer rows 1, 2 and go to 4 5. places = [0, 4, 5, 1, 2, 3].
    """
    filled = list(layout.starts)
    shift: list[int] = []  # padded place minus buffer place, a block
    sizes: list[int] = []
    row = 0
    for source in counts:
        for expert, count in enumerate(source):
            shift.append(filled[expert] - row)
            sizes.append(count)
            filled[expert] += count
            row += count
    packed = torch.tensor([shift, sizes], dtype=torch.int64).to(device)
    return torch.arange(row, device=device) + packed[0].repeat_interleave(packed[1], output_size=row)


@dataclass(frozen=True)
class Plan:
    """Where a rank's pairs and rows go. ``send``, ``receive`` and ``padded_R`` are empty where no rows travel."""

    rows: RowLayout
    place_R: torch.Tensor  # of each own pair: its row in the padded buffer, or in the buffer to send
    send: list[int]  # rows to each rank
    receive: list[int]
    padded_R: torch.Tensor  # of each received row: its row in the padded buffer


def plan_alone(experts_TK: torch.Tensor, counts_E: torch.Tensor, multiple: int, same_size: bool) -> Plan:
    """All experts are here. One host sync."""
    counts = counts_E.tolist()
    rows = layout_rows(counts, multiple, same_size, counts_E.device)
    place_R = block_places([counts], rows, counts_E.device)[sorted_places(experts_TK.flatten())]
    return Plan(rows, place_R, [], [], place_R.new_empty(0))


def plan_exchange(
    experts_TK: torch.Tensor, counts_E: torch.Tensor, multiple: int, same_size: bool, group: dist.ProcessGroup
) -> Plan:
    """Each rank of ``group`` has E / ep experts. One small all-to-all and one host sync."""
    received_E = torch.empty_like(counts_E)
    dist.all_to_all_single(received_E, counts_E.contiguous(), group=group)
    sent, received = torch.stack((counts_E, received_E)).view(2, group.size(), -1).tolist()
    totals = [sum(column) for column in zip(*received, strict=True)]
    rows = layout_rows(totals, multiple, same_size, counts_E.device)
    return Plan(
        rows,
        sorted_places(experts_TK.flatten()),
        [sum(block) for block in sent],
        [sum(block) for block in received],
        block_places(received, rows, counts_E.device),
    )


Compute = Callable[[torch.Tensor, RowLayout], torch.Tensor]


def run_experts(
    x_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    counts_E: torch.Tensor,
    compute: Compute,
    multiple: int,
    same_size: bool,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Each token's weighted sum over its chosen experts, [T, D]. Dropless.

    ``compute``: padded rows sorted by local expert -> the same rows' outputs. ``group``: the ep ranks, each owning
    E / ep consecutive experts; None: all experts are here.
    """
    T, K = experts_TK.shape
    if group is None or group.size() == 1:
        plan = decided(lambda: plan_alone(experts_TK, counts_E, multiple, same_size))
        y_PD = compute(scatter_rows(x_TD, plan.place_R, plan.rows.total, K), plan.rows)
    else:
        plan = decided(lambda: plan_exchange(experts_TK, counts_E, multiple, same_size, group))
        x_RD = scatter_rows(x_TD, plan.place_R, T * K, K)
        x_RD = _AllToAll.apply(x_RD, plan.receive, plan.send, group)
        y_PD = compute(scatter_rows(x_RD, plan.padded_R, plan.rows.total), plan.rows)
        y_PD = _AllToAll.apply(gather_rows(y_PD, plan.padded_R), plan.send, plan.receive, group)
    y_TKD = gather_rows(y_PD, plan.place_R).view(T, K, -1)
    return torch.bmm(weights_TK.to(y_TKD.dtype).unsqueeze(1), y_TKD).squeeze(1)
