"""What 100 % of the machine is: the profile's figure, or on a CPU a short matmul, measured. Always named with its source."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcmoe.config.precision import precision_of
from hpcmoe.config.schema import Config

MEASURE_S = 0.15
SIZE = 384


@dataclass(frozen=True)
class Peak:
    tflops: float | None  # of all ranks together; None: not known, and MFU is not given
    precision: str
    source: str  # profile | measured | unknown

    def __str__(self) -> str:
        return "unknown peak" if self.tflops is None else f"of {self.tflops:.2g} TFLOP/s {self.precision} {self.source}"


def find_peak(config: Config, device: torch.device, local_ranks: int) -> Peak:
    """The profile's dense peak for the precision in use, times ranks; without one, on CPU, measured by all ranks at once."""
    precision = precision_of(config).name
    given = config.cluster.gpu.peak_tflops.get(precision)
    if given is not None:
        return Peak(given * dist.get_world_size(), precision, "from the cluster profile")
    if device.type != "cpu":
        return Peak(None, precision, "unknown")
    best = _best_matmul_rate(torch.bfloat16 if precision == "bf16" else torch.float32)
    total = torch.tensor([best * share_of_cores(local_ranks, torch.get_num_threads(), os.cpu_count() or 1)], dtype=torch.float64)
    dist.all_reduce(total)
    return Peak(total.item() / 1e12, precision, "measured")


def share_of_cores(local_ranks: int, threads: int, cores: int) -> float:
    """How much of its threads' speed a rank can have while the node's other ranks compute too."""
    return min(1.0, cores / (local_ranks * threads))


def _best_matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of many short matmuls: the others waited for a core or for a neighbour's work."""
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    out = a @ a
    best, begun = 0.0, time.perf_counter()
    while (start := time.perf_counter()) - begun < MEASURE_S:
        torch.mm(a, a, out=out)
        best = max(best, 2.0 * SIZE**3 / (time.perf_counter() - start))
    return best
