"""Loading: the newest checkpoint that is whole; damaged ones are named, journalled and passed over.

Not for saving (hpcmoe.engine.checkpoint).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from hpcmoe.engine import manifest
from hpcmoe.engine.checkpoint import Progress, collect_state
from hpcmoe.engine.rng import set_rng_state
from hpcmoe.engine.stages import Stages
from hpcmoe.errors import UserError
from hpcmoe.runs.journal import Journal


def load_newest(
    checkpoints: Path,
    verify: str,
    facts: dict[str, Any],
    stages: Stages,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    journal: Journal | None,
) -> Progress | None:
    """Continue ``stages`` and ``optimizer`` in place; None when no checkpoint is whole (their values are then undefined)."""
    steps: list[Any] = [manifest.published(checkpoints)]
    dist.broadcast_object_list(steps, src=0, group=group)
    for step in steps[0]:
        directory = checkpoints / manifest.checkpoint_name(step)
        reason = _agreed_damage(directory, verify == "full", facts, group)
        progress = None
        if reason is None:
            try:
                progress, converted = _load(directory, stages, optimizer, group)
            except CheckpointException as error:
                reason = f"cannot be loaded: {_first_cause(error)}"
        if progress is not None:
            if journal is not None:
                changed = {"moments": converted} if converted else {}
                journal.append("resumed", step=progress.step, checkpoint=directory.name, **changed)
            return progress
        if journal is not None:
            journal.append("checkpoint_skipped", checkpoint=directory.name, reason=reason)
            print(f"checkpoint {directory.name} is skipped: {reason}", file=sys.stderr, flush=True)
    return None


def _agreed_damage(directory: Path, full: bool, facts: dict[str, Any], group: dist.ProcessGroup) -> str | None:
    """Each rank checks its share of the files; all learn the first reason. A checkpoint of another model is the user's error."""
    shared: list[Any] = [manifest.read_manifest(directory)]
    dist.broadcast_object_list(shared, src=0, group=group)
    if isinstance(shared[0], str):
        return shared[0]
    if shared[0].get("model") != facts["model"]:
        raise UserError(f"{directory} holds another model than config.yaml describes; nothing was changed")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = {name: record for i, (name, record) in enumerate(sorted(shared[0]["files"].items())) if i % ranks == rank}
    reasons: list[Any] = [None] * ranks
    dist.all_gather_object(reasons, manifest.damage(directory, mine, full), group=group)
    return next((reason for reason in reasons if reason is not None), None)


def _load(
    directory: Path, stages: Stages, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> tuple[Progress, str | None]:
    """(progress, what became of moments that were stored in another dtype than this optimizer's)."""
    reader = dcp.FileSystemReader(directory)
    state = collect_state(stages, optimizer, Progress())
    held = reader.read_metadata().state_dict_metadata
    state["progress"] = {name: value for name, value in state["progress"].items() if f"progress.{name}" in held}
    if f"rng.{dist.get_rank()}" not in held:
        state.pop("rng")  # written by fewer ranks: this one keeps the state it was seeded with
    dcp.load(state, storage_reader=reader, process_group=group)  # into the live tensors, all of them
    if "rng" in state:
        set_rng_state(next(iter(state["rng"].values())))
    return Progress(**state["progress"]), _conversion(held, state["optim"])


def _conversion(held: Mapping[str, Any], moments: dict[str, dict[str, torch.Tensor]]) -> str | None:
    """fp32 into bf16 rounds to the nearest value, bf16 into fp32 is exact; None when nothing was converted."""
    for name, entry in moments.items():
        stored, here = held[f"optim.{name}.exp_avg"].properties.dtype, entry["exp_avg"].dtype
        return None if stored == here else f"{str(stored).removeprefix('torch.')} to {str(here).removeprefix('torch.')}"
    return None


def _first_cause(error: CheckpointException) -> str:
    cause = next(iter(error.failures.values()))[0] if error.failures else error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
