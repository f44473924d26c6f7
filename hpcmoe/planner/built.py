"""One rank of a plan as the engine builds it, on fake tensors in a fake process group, and the bytes that its step holds.

The engine's own build, forward and backward pass run; only routing, which depends on data, is stood in for: balanced. Of a
pipeline, this rank's stages take as many microbatches as the schedule holds at once; transfers between ranks are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcmoe.config.schema import Config
from hpcmoe.engine.build import build_parts
from hpcmoe.engine.compute import LossSum
from hpcmoe.engine.optimizer import build_optimizer, named_moments
from hpcmoe.engine.stages import Stages
from hpcmoe.engine.support import Sizes
from hpcmoe.models import dispatch, moe
from hpcmoe.models.dispatch import Plan as Rows
from hpcmoe.models.dispatch import RowLayout
from hpcmoe.models.transformer import Transformer
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.ledger import Ledger


@dataclass(frozen=True)
class BuiltBytes:
    """What one rank holds. ``activations``: all that the microbatches in flight keep; ``peak``: most at once, state included."""

    params: float
    grads: float
    optimizer: float
    activations: float
    peak: float


def sizes_of(layout: Layout, batch: int) -> Sizes:
    """``batch``: sequences of a step."""
    return Sizes(
        dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard, tp=layout.tp, pp=layout.pp, ep=layout.ep, efsdp=layout.efsdp,
        global_batch=batch, microbatch=layout.microbatch, ep_placement=layout.ep_placement, schedule=layout.schedule,
    )  # fmt: skip


def measure(config: Config, layout: Layout, batch: int, pp_rank: int, flight: tuple[float, ...]) -> BuiltBytes:
    """Build pipeline rank ``pp_rank`` and take ``flight[i]`` microbatches through its i-th stage before the first goes back."""
    asked = replace(config, layout=replace(config.layout, recompute=layout.recompute))
    with _fake_world(layout.world, pp_rank * (layout.world // layout.pp)):
        _, stages = build_parts(asked, sizes_of(layout, batch), torch.device("cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger, _balanced():
            for part in stages.parts:
                part.to_empty(device="cpu")
            optimizer = build_optimizer(stages.parameters(), config.optim, config.precision.moments)
            named_moments(stages.named_parameters(), optimizer)
            return _step(config, layout, stages, optimizer, ledger, [max(1, round(n)) for n in flight])


def _step(
    config: Config, layout: Layout, stages: Stages, optimizer: torch.optim.Optimizer, ledger: Ledger, flight: list[int]
) -> BuiltBytes:
    shape = (layout.microbatch, config.train.seq_len)
    params = float(sum(_local(p) for p in stages.parameters()))
    moments = float(sum(_local(t) for state in optimizer.state.values() for name, t in state.items() if name != "step"))
    if layout.pp > 1:
        _sum_whole_gradients(stages)
    for (
        part
    ) in stages.parts:  # a first microbatch leaves gradients, and a pipeline's weights gathered; what it keeps does not tell
        part.set_recompute("none")
        _backward(part, _forward(part, shape))
        part.set_recompute(layout.recompute)
    before = ledger.now
    alive = [_forward(part, shape) for part, count in zip(stages.parts, flight, strict=True) for _ in range(count)]
    if layout.pp == 1:
        for passed in alive:
            passed.result = passed.output  # only a pipeline's stages keep it until its backward pass is over
    activations = ledger.now - before - sum(passed.bytes_beside() for passed in alive)
    ledger.restart()
    part = stages.parts[-1]
    _backward(part, alive.pop())
    grads = float(sum(_gradient(p) for p in stages.parameters()))
    if layout.pp > 1:
        grads = float(_whole_gradients(stages))
    return BuiltBytes(params, grads, moments, float(activations), float(ledger.peak))


@dataclass
class _Passed:
    """A microbatch that went forward: what entered the part, what it gave (``result``), and what goes backward from there."""

    entered: torch.Tensor
    output: torch.Tensor  # of a last stage its loss
    result: torch.Tensor

    def bytes_beside(self) -> int:
        """Of what is alive only because somebody refers to it, and not for the backward pass."""
        storages = [self.output.untyped_storage()]
        if self.result is not self.output:
            storages.append(self.result.untyped_storage())
        return sum(storage.nbytes() for storage in storages)


def _forward(part: Transformer, shape: tuple[int, int]) -> _Passed:
    """One microbatch."""
    B, S = shape
    if part.part.first:
        entered = torch.zeros(B, S, dtype=torch.int64)
    else:
        entered = torch.empty(B, S // part.tp.size, part.model.hidden, dtype=_compute_dtype(part), requires_grad=True)
    output = result = part(entered)
    if part.part.last:
        output = LossSum(part, torch.device("cpu")).add(result, torch.zeros(B, S, dtype=torch.int64))
    return _Passed(entered, output, result)


def _backward(part: Transformer, passed: _Passed) -> None:
    passed.output.backward(None if part.part.last else torch.empty_like(passed.output))


def _compute_dtype(part: Transformer) -> torch.dtype:
    state: Any = part._get_fsdp_state()  # type: ignore[operator]
    return state._mp_policy.param_dtype or torch.float32


def _sum_whole_gradients(stages: Stages) -> None:
    """As PyTorch's pipeline stages set FSDP before each backward pass but the last."""
    for part in stages.parts:
        assert isinstance(part, FSDPModule)
        part.set_is_last_backward(False)
        part.set_reshard_after_backward(False)
        part.set_requires_gradient_sync(False)


def _local(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _gradient(parameter: torch.Tensor) -> int:
    return 0 if parameter.grad is None else _local(parameter.grad)


def _whole_gradients(stages: Stages) -> int:
    total = 0
    for module in stages.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for param in group.fsdp_params:
                    held = param.unsharded_accumulated_grad
                    held = held if held is not None else param.unsharded_param.grad
                    total += 0 if held is None else _local(held)
    return total


@contextmanager
def _fake_world(size: int, rank: int) -> Iterator[None]:
    """A process group of ``size`` ranks in which collectives do nothing; this process is ``rank``."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _balanced() -> Iterator[None]:
    """Stand-ins for what has no value without data: how many tokens each expert gets."""

    def rows(pairs: int, local: int, multiple: int, like: torch.Tensor) -> RowLayout:
        size = -(-max(1, pairs) // (local * multiple)) * multiple
        return RowLayout([i * size for i in range(local)], [size] * local, like.new_empty(local, dtype=torch.int32))

    def alone(experts_TK: torch.Tensor, counts_E: torch.Tensor, multiple: int, same_size: bool) -> Rows:
        pairs = experts_TK.numel()
        place = counts_E.new_empty(pairs)
        return Rows(rows(pairs, len(counts_E), multiple, counts_E), place, [], [], counts_E.new_empty(0))

    def exchange(experts_TK: torch.Tensor, counts_E: torch.Tensor, multiple: int, same_size: bool, group: Any) -> Rows:
        pairs, ranks = experts_TK.numel(), group.size()
        each = [pairs // ranks + (1 if rank < pairs % ranks else 0) for rank in range(ranks)]
        layout = rows(pairs, len(counts_E) // ranks, multiple, counts_E)
        return Rows(layout, counts_E.new_empty(pairs), each, each, counts_E.new_empty(pairs))

    def bincount(x: torch.Tensor, minlength: int = 0) -> torch.Tensor:
        return x.new_empty(minlength)

    stand_ins: list[tuple[Any, str, Any]] = [
        (dispatch, "plan_alone", alone),
        (dispatch, "plan_exchange", exchange),
        (torch, "bincount", bincount),
        (moe, "choose_kernel", lambda device, dtype: "padded_bmm"),  # grouped_mm keeps the same; its fake kernel wants bf16
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    try:
        for owner, name, stand_in in stand_ins:
            setattr(owner, name, stand_in)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
