"""Threads and determinism of one rank's arithmetic: set once, before the first kernel and the first process group.

With train.deterministic, same seed, config and layout give the same bits. Weights, data order: parallelize, hpcmoe.data.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

from hpcmoe.config.schema import Config


def set_numerics(config: Config, env: MutableMapping[str, str] = os.environ) -> None:
    """Threads come from the job, not from the host: sums over another number of threads round differently."""
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "") or config.slurm.cpus_per_task or 1))
    if not config.train.deterministic:
        return
    for name, value in deterministic_environment().items():
        env.setdefault(name, value)
    torch.use_deterministic_algorithms(True)  # an operation that has no such algorithm raises
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # it would choose among algorithms by the clock


def deterministic_environment() -> dict[str, str]:
    """What libraries read before they start. What the user has set is left alone.

    cuBLAS: a workspace of fixed size, or matmuls on several streams may sum in another order. NCCL: rings, whose order of
    summation is fixed by rank; otherwise it may choose another algorithm, such as in-switch sums, by size and by tuning.
    """
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
