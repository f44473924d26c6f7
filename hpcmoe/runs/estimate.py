"""What a submission will use, in GPU-hours, and the one question before a costly one. Whether it fits is the planner's part."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.slurm.parse import parse_duration

HOUR_S = 3600.0


def counted_gpus(cfg: Config) -> int:
    """GPUs that an attempt holds, those of spare nodes too (of an elastic run: at most); 0 where nobody counts them."""
    counted = cfg.cluster.device == "cuda" or cfg.cluster.gres
    return (cfg.nodes + cfg.spare_nodes) * cfg.gpus_per_node if counted else 0


def estimate_gpu_hours(config: Config, tokens_per_s: float | None) -> float | None:
    """By the planner's speed of one GPU (``tokens_per_s``), else GPUs x one attempt's time limit; no more than the run's ceiling.

    0 where no GPUs are counted; None: neither a speed nor a time limit is known.
    """
    gpus, ceiling = counted_gpus(config), config.resilience.max_gpu_hours
    if gpus == 0:
        return 0.0
    limit = None if config.slurm.time is None else parse_duration(config.slurm.time)
    if tokens_per_s:
        found: float | None = config.train.steps * config.train.global_batch_tokens / tokens_per_s / HOUR_S
    else:
        found = None if limit is None else gpus * limit / HOUR_S
    known = [hours for hours in (found, ceiling) if hours is not None]
    return min(known, default=None)


def estimate_hours(config: Config, tokens_per_s: float | None) -> float | None:
    """Hours on its nodes, by the planner's speed of one GPU, else one attempt's time limit; no more than the ceiling allows.

    None: neither a speed nor a time limit is known.
    """
    gpus, ceiling = counted_gpus(config), config.resilience.max_gpu_hours
    limit = None if config.slurm.time is None else parse_duration(config.slurm.time)
    if tokens_per_s:
        tokens = config.train.steps * config.train.global_batch_tokens
        found: float | None = tokens / (tokens_per_s * config.world_size) / HOUR_S
    else:
        found = None if limit is None else limit / HOUR_S
    if found is None or ceiling is None or gpus == 0:
        return found
    return min(found, ceiling / gpus)


def confirm(estimates: Sequence[float | None], ask_above: float | None, yes: bool) -> None:
    """Ask at a terminal whether to submit these runs, when that costs more than ``ask_above`` GPU-hours (None: never ask).

    Raises UserError when the answer is no, and where nobody can be asked. What is not known counts as nothing.
    """
    total = sum(hours for hours in estimates if hours is not None)
    if yes or ask_above is None or total <= ask_above:
        return
    what = f"about {total:,.0f} GPU-hours" + (f" in {len(estimates)} runs" if len(estimates) > 1 else "")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(
            f"this would use {what}, more than resilience.ask_above_gpu_hours={ask_above:g}, and nobody can be asked here; "
            "--yes submits it, resilience.max_gpu_hours=N sets a ceiling"
        )
    print(f"this will use {what}. Submit? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nothing is submitted")
