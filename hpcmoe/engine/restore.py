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
from torch.distributed.checkpoint.metadata import Metadata

from hpcmoe.engine import manifest
from hpcmoe.engine.checkpoint import Progress, collect_state, first_failure, in_one_line
from hpcmoe.engine.rng import set_rng_state
from hpcmoe.engine.stages import Stages
from hpcmoe.errors import UserError
from hpcmoe.runs.journal import Journal

COMPUTED_WITH = ("layout", "world_size", "microbatch", "torch")


class UnreadableError(Exception):
    """A checkpoint's own table of contents is not to be had."""


def load_newest(
    checkpoints: Path,
    verify: str,
    facts: dict[str, Any],
    stages: Stages,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    journal: Journal | None,
    unsound: set[int] | None = None,
) -> Progress | None:
    """Continue ``stages`` and ``optimizer`` in place; None when no checkpoint is whole (their values are then undefined).

    Newest means the highest step: no clock decides. ``unsound`` is told the steps that were passed over.
    """
    steps: list[Any] = [_on_disk(checkpoints) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(steps, src=0, group=group)
    for step in steps[0]:
        directory = checkpoints / manifest.checkpoint_name(step)
        read, reason = _agreed_damage(directory, verify == "full", facts, group)
        if reason is None:
            try:
                progress, converted = _load(directory, stages, optimizer, group)
            except (CheckpointException, UnreadableError) as error:
                reason = f"cannot be loaded: {first_failure(error)}"
        if reason is None:
            if journal is not None:
                _journal_resumed(journal, directory, progress, read, facts, converted)
            return progress
        if unsound is not None:
            unsound.add(step)
        if journal is not None:
            journal.append("checkpoint_skipped", checkpoint=directory.name, reason=reason)
            print(f"CHECKPOINT SKIPPED: {directory.name}: {reason}", file=sys.stderr, flush=True)
    return None


def _on_disk(checkpoints: Path) -> list[int]:
    """Rank 0's view, newest first, after what a killed attempt had all but published was put right."""
    for name in manifest.adopt_scraps(checkpoints):
        print(f"checkpoint {name}: an earlier attempt was killed between writing and naming it; named now", flush=True)
    return manifest.published(checkpoints)


def _journal_resumed(
    journal: Journal, directory: Path, progress: Progress, read: dict[str, Any], facts: dict[str, Any], converted: str | None
) -> None:
    """Where this attempt starts, whose checkpoint that is, and how the two compute (what bit-identical losses depend on)."""
    journal.append(
        "resumed",
        step=progress.step,
        checkpoint=directory.name,
        tokens=progress.tokens,
        made_by=read.get("attempt"),
        made_with=computed_with(read),
        **computed_with(facts),
        **({"moments": converted} if converted else {}),
    )


def computed_with(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of a manifest's facts, those on which a loss's last bits may depend."""
    return {key: facts[key] for key in COMPUTED_WITH if key in facts}


def _agreed_damage(
    directory: Path, full: bool, facts: dict[str, Any], group: dist.ProcessGroup
) -> tuple[dict[str, Any], str | None]:
    """(manifest, the first thing wrong). Each rank checks its share of the files. Another model's is the user's error."""
    shared: list[Any] = [manifest.read_manifest(directory)]
    dist.broadcast_object_list(shared, src=0, group=group)
    if isinstance(shared[0], str):
        return {}, shared[0]
    if shared[0].get("model") != facts["model"]:
        raise UserError(f"{directory} holds another model than config.yaml describes; nothing was changed")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = {name: record for i, (name, record) in enumerate(sorted(shared[0]["files"].items())) if i % ranks == rank}
    reasons: list[Any] = [None] * ranks
    dist.all_gather_object(reasons, manifest.damage(directory, mine, full), group=group)
    return shared[0], next((reason for reason in reasons if reason is not None), None)


def _load(
    directory: Path, stages: Stages, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> tuple[Progress, str | None]:
    """(progress, what became of moments that were stored in another dtype than this optimizer's).

    Raises CheckpointException or UnreadableError, on all ranks, where one of them cannot read what it needs.
    """
    reader = dcp.FileSystemReader(directory)
    state = collect_state(stages, optimizer, Progress())
    held = _metadata(reader, group).state_dict_metadata
    state["progress"] = {name: value for name, value in state["progress"].items() if f"progress.{name}" in held}
    if f"rng.{dist.get_rank()}" not in held:
        state.pop("rng")  # written by fewer ranks: this one keeps the state it was seeded with
    dcp.load(state, storage_reader=reader, process_group=group)  # into the live tensors, all of them
    if "rng" in state:
        set_rng_state(next(iter(state["rng"].values())))
    return Progress(**state["progress"]), _conversion(held, state["optim"])


def _metadata(reader: dcp.FileSystemReader, group: dist.ProcessGroup) -> Metadata:
    """What the checkpoint holds; where its size alone was verified, reading it may fail in any way."""
    found, failure = None, None
    try:
        found = reader.read_metadata()
    except Exception as error:
        failure = in_one_line(error)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group=group)
    for rank, reason in enumerate(failures):
        if reason is not None:
            raise UnreadableError(f"rank {rank}: {reason}")
    assert found is not None
    return found


def _conversion(held: Mapping[str, Any], moments: dict[str, dict[str, torch.Tensor]]) -> str | None:
    """fp32 into bf16 rounds to the nearest value, bf16 into fp32 is exact; None when nothing was converted."""
    for name, entry in moments.items():
        stored, here = held[f"optim.{name}.exp_avg"].properties.dtype, entry["exp_avg"].dtype
        return None if stored == here else f"{str(stored).removeprefix('torch.')} to {str(here).removeprefix('torch.')}"
    return None
