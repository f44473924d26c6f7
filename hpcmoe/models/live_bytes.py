"""Bytes of the tensors that operators made and that are still alive, by their storages. For checks and benchmarks on any device.

Not an allocator's figure: no rounding, no cache, no workspace inside a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts what is made while it is entered. What was there before (parameters, inputs) is not counted, nor are views of it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._foreign: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes alive."""
        dead = [key for key, (storage, _) in self._storages.items() if storage.expired()]
        for key in dead:
            del self._storages[key]
        return sum(size for _, size in self._storages.values())
