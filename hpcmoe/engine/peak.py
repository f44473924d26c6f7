"""What 100 % of the machine is: the profile's figure, or on a CPU a short matmul, measured. Always named with its source."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcmoe.config.schema import Config

MEASURE_S = 0.12
SIZE = 512


@dataclass(frozen=True)
class Peak:
    tflops: float | None  # of all ranks together; None: not known, and MFU is not given
    precision: str
    source: str  # profile | measured | unknown

    def __str__(self) -> str:
        return "unknown peak" if self.tflops is None else f"of {self.tflops:.3g} TFLOP/s {self.precision} {self.source}"


def find_peak(config: Config, device: torch.device) -> Peak:
    """The profile's dense peak for the precision in use, times ranks; without one, on CPU, measured by all ranks at once."""
    precision = config.precision.name.name
    given = config.cluster.gpu.peak_tflops.get(precision)
    if given is not None:
        return Peak(given * dist.get_world_size(), precision, "from the cluster profile")
    if device.type != "cpu":
        return Peak(None, precision, "unknown")
    total = torch.tensor([_matmul_rate(torch.bfloat16 if precision == "bf16" else torch.float32)], dtype=torch.float64)
    dist.all_reduce(total)
    return Peak(total.item() / 1e12, precision, "measured")


def _matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a square matmul on this rank while the other ranks do the same: they share the cores."""
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    out = a @ a
    dist.barrier()
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < MEASURE_S:
        torch.mm(a, a, out=out)
        done += 1
    return done * 2.0 * SIZE**3 / (time.perf_counter() - begun)
