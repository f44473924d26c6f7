"""Bytes of tensors alive in a process, now and at most, whatever made them: real tensors on a rank, or fake ones of --verify.

Counts storages as they are made, resized and dropped. Not the allocator's cache, and not what a kernel uses inside.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
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

    def __enter__(self) -> Ledger:
        plain, ledger = self._resize, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = plain(storage, size)
            ledger._count(storage)
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here one by one
        out = func(*args, **(kwargs or {}))
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
