"""Activation checkpointing inside a block: the first pass keeps little, a second one during backward computes the rest again.

``full`` keeps a block's input and its routing. ``selective`` keeps the results of attention, matrix products (but the router's),
reduce-scatters and all-to-alls too; it repeats norms, rotations, activation functions, the router's product, permutations and
gathers of the sequence. ``layer`` is ``full`` in layers of even number. Routing is never decided twice. Not for schedules that
split the backward pass: each part of it would compute a block again (hpcmoe.engine.support refuses them).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

Mode = Literal["none", "full", "selective"]
T = TypeVar("T")

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default})
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


def mode_of_layer(recompute: str, layer: int) -> Mode:
    """What ``layout.recompute`` means for the layer of this number."""
    if recompute == "layer":
        return "none" if layer % 2 else "full"
    if recompute in ("none", "full", "selective"):
        return recompute  # type: ignore[return-value]
    raise ValueError(f"no recompute mode {recompute!r}")


class _Record:
    """What the first pass of one block over one microbatch made, in order; later passes read it in the same order."""

    def __init__(self, selective: bool) -> None:
        self.selective = selective
        self.repeating = False
        self._made: list[tuple[object, Any]] = []
        self._next = 0
        self._paused = False

    def begin(self, repeating: bool) -> None:
        self.repeating, self._next = repeating, 0

    def result(self, what: object, make: Callable[[], T]) -> T:
        """``make()`` in the first pass; the same again, without calling it, in later ones."""
        if self._paused:
            return make()
        if self.repeating:
            made_as, value = self._made[self._next]
            assert made_as == what, f"the second pass wants {what} where the first made {made_as}"
            self._next += 1
            return _detached(value)
        self._paused = True  # what is made on the way is not asked for again
        try:
            value = make()
        finally:
            self._paused = False
        self._made.append((what, _detached(value)))
        return value


_record: ContextVar[_Record | None] = ContextVar("recompute_record", default=None)


class _Pass(AbstractContextManager[None]):
    """Makes ``record`` the current one; can be entered again."""

    def __init__(self, record: _Record, repeating: bool) -> None:
        self.record, self.repeating = record, repeating

    def __enter__(self) -> None:
        self.record.begin(self.repeating)
        self._token = _record.set(self.record)

    def __exit__(self, *exception: object) -> None:
        _record.reset(self._token)


def _detached(value: Any) -> Any:
    """Without the graph, which would hold the record that the graph holds."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def decided(make: Callable[[], T]) -> T:
    """A decision: in every mode a second pass gets what the first one made. Tensors in it carry no gradient."""
    record = _record.get()
    return make() if record is None else record.result("decision", make)


def exchanged(make: Callable[[], T]) -> T:
    """The result of a collective, which ``selective`` keeps. To be called below autograd."""
    record = _record.get()
    return make() if record is None or not record.selective else record.result("exchange", make)


def keep(ops: frozenset[Any], needed: bool = True) -> AbstractContextManager[Any]:
    """``selective`` keeps the results of ``ops`` inside.

    ``needed`` False: only a kept collective reads these results, so a second pass gets memory of their shape and no values.
    """
    record = _record.get()
    return nullcontext() if record is None or not record.selective else _Keep(record, ops, needed)


class _Keep(TorchDispatchMode):
    def __init__(self, record: _Record, ops: frozenset[Any], needed: bool) -> None:
        super().__init__()
        self.record, self.ops, self.needed = record, ops, needed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            return func(*args, **(kwargs or {}))

        if func not in self.ops:
            return run()
        if self.needed:
            return self.record.result(func, run)
        return self._shape_only(func, run)

    def _shape_only(self, func: Any, run: Callable[[], Any]) -> Any:
        out = None

        def like() -> tuple[Any, ...]:
            nonlocal out
            out = run()
            return out.shape, out.stride(), out.dtype, out.device

        shape, stride, dtype, device = self.record.result(func, like)
        return torch.empty_strided(shape, stride, dtype=dtype, device=device) if out is None else out


def through(compute: Callable[..., T], mode: Mode, *args: Any) -> T:
    """``compute(*args)``, keeping what ``mode`` says for its backward pass."""
    if mode == "none" or not torch.is_grad_enabled():
        return compute(*args)
    record = _Record(selective=mode == "selective")
    contexts = (_Pass(record, repeating=False), _Pass(record, repeating=True))
    # no generator state: nothing in a block is random
    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts)
