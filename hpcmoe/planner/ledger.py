"""Bytes of tensors alive in a process, now and at most, whatever made them: real tensors on a rank, or fake ones of --verify.

Counts storages as they are made, resized and dropped. Not the allocator's cache, not what a kernel uses inside, and not the fake
tensors of whole size on which DTensor tries an operator that it meets for the first time.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """``with Ledger() as ledger``: ``ledger.now`` and ``ledger.peak`` in bytes, of what was made or seen since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize = torch.UntypedStorage.resize_
        self._try_out = ShardingPropagator._propagate_tensor_meta_non_cached
        self._blind = False

    def __enter__(self) -> Ledger:
        resize, try_out, ledger = self._resize, self._try_out, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            ledger._count(storage)
            return out

        def tried_out(propagator: ShardingPropagator, schema: Any) -> Any:
            before, ledger._blind = ledger._blind, True
            try:
                return try_out(propagator, schema)
            finally:
                ledger._blind = before

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = tried_out  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._try_out  # type: ignore[method-assign]
        super().__exit__(*exception)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here: PyTorch's guard against it would be paid at every operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of what comes here with fake tensors
            return args[0].device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here one by one
        out = func(*args, **(kwargs or {}))
        if self._blind:
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return out

    def restart(self) -> None:
        """Forget the peak: from here on."""
        self.peak = self.now

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._drop(key))
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
        self._alive.pop(key, None)
