"""Saving: torch.distributed.checkpoint into a directory beside, checksums, manifest, rename. In a thread, or blocking to leave.

Not for loading (hpcmoe.engine.restore) nor for the on-disk rules (hpcmoe.engine.manifest).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.config.schema import CheckpointConfig
from hpcmoe.engine import manifest
from hpcmoe.engine.optimizer import named_moments
from hpcmoe.engine.rng import rng_state
from hpcmoe.engine.stages import Stages
from hpcmoe.models.transformer import Transformer
from hpcmoe.runs.journal import Journal


@dataclass
class Progress:
    """How far training is; all that the schedule and the data order need."""

    step: int = 0
    tokens: int = 0
    position: int = 0  # samples consumed
    corpus: str = ""  # its fingerprint
    held_out: int = 0  # sequences of it that are kept for evaluation
    skipped: int = 0  # steps that were not taken
    callbacks: str = "{}"  # their states by name, as JSON: floats come back with the same bits


def collect_state(stages: Stages, optimizer: torch.optim.Optimizer, progress: Progress) -> dict[str, Any]:
    """Everything a run continues from, by name. Tensors are the live ones."""
    return {
        "model": stages.state_dict(),
        "optim": named_moments(stages.named_parameters(), optimizer),
        "progress": asdict(progress),
        "rng": {str(dist.get_rank()): rng_state()},
    }


def staged(state: dict[str, Any]) -> dict[str, Any]:
    """A copy in CPU memory that later steps do not touch."""

    def copy(value: Any) -> Any:
        if isinstance(value, DTensor):
            local = value.to_local().detach()
            return DTensor(local.to("cpu", copy=True), value._spec, requires_grad=False)
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    return tree_map(copy, state)


@dataclass
class Checkpointer:
    """One save at a time. All ranks call the same methods in the same order; collectives run in a group of their own."""

    checkpoints: Path
    attempt: str
    config: CheckpointConfig
    facts: dict[str, Any]  # what the manifest tells people and later versions
    journal: Journal | None  # rank 0's
    model: ModelConfig  # what must be in a checkpoint, whoever has which part of it
    saved_step: int | None = None  # the newest step known to be durable, on every rank
    group: dist.ProcessGroup = field(init=False)

    def __post_init__(self) -> None:
        group = dist.new_group(backend="gloo")  # never the training's: a thread uses it while steps run
        assert group is not None
        self.group = group
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._flight: tuple[int, Future[None]] | None = None

    def start(self, stages: Stages, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Save in the background; the caller is held for the copy only, and for an earlier save that is not done yet."""
        begun = time.monotonic()
        self.wait(strict=False)
        state = staged(collect_state(stages, optimizer, progress))
        blocked = time.monotonic() - begun
        self._flight = (progress.step, self._pool.submit(self._write, state, progress.step, begun, blocked))
        if not self.config.asynchronous:
            self.wait(strict=False)

    def save_durably(self, stages: Stages, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Return when the current step is in a published checkpoint; raise if it cannot be. None is written twice."""
        self.wait(strict=False)
        if self.saved_step == progress.step:
            return
        state = collect_state(stages, optimizer, progress)
        begun = time.monotonic()
        self._flight = (progress.step, self._pool.submit(self._write, state, progress.step, begun, None))
        self.wait(strict=True)

    def poll(self) -> None:
        """Notice a background save that is done, so that its failure is told when it happens."""
        if self._flight is not None and self._flight[1].done():
            self.wait(strict=False)

    def in_flight(self) -> bool:
        return self._flight is not None

    def wait(self, strict: bool) -> None:
        """Until no save is in flight. A failed one is journalled; it raises only if ``strict``."""
        if self._flight is None:
            return
        step, future = self._flight
        self._flight = None
        try:
            future.result()
        except Exception as error:
            if self.journal is not None:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self.journal.append("checkpoint_failed", step=step, checkpoint=manifest.checkpoint_name(step), reason=reason)
                print(f"checkpoint of step {step} failed: {reason}", file=sys.stderr, flush=True)
            if strict:
                raise
        else:
            self.saved_step = step

    def _write(self, state: dict[str, Any], step: int, begun: float, blocked: float | None) -> None:
        rank = dist.get_rank()
        tmp = self.checkpoints / manifest.scrap_name(step, self.attempt, "tmp")
        if rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)
        dist.barrier(self.group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=FutureWarning)
            dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp, thread_count=1, sync_files=True), process_group=self.group)
        own = [name for name in os.listdir(tmp) if name.startswith(f"__{rank}_") or (rank == 0 and name == ".metadata")]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, manifest.record_files(tmp, own), group=self.group)
        outcome: list[str | None] = [None]
        if rank == 0:
            records = [record for part in gathered for record in part]
            try:
                check_whole(dcp.FileSystemReader(tmp), self.model)
                told = {name: value for name, value in state["progress"].items() if name != "callbacks"}
                manifest.publish(self.checkpoints, step, self.attempt, records, self.facts | told)
            except OSError as error:
                outcome = [str(error)]
            else:
                self._tell(step, sum(record.bytes for record in records), time.monotonic() - begun, blocked)
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[0] is not None:
            raise OSError(outcome[0])
        if rank == 0:
            self._prune(step)

    def _tell(self, step: int, size: int, seconds: float, blocked: float | None) -> None:
        assert self.journal is not None
        self.journal.append(
            "checkpoint_saved",
            step=step,
            checkpoint=manifest.checkpoint_name(step),
            seconds=round(seconds, 4),
            blocked_s=round(seconds if blocked is None else blocked, 4),
            bytes=size,
        )

    def _prune(self, newest: int) -> None:
        steps = manifest.published(self.checkpoints)
        for step in manifest.to_delete(steps, newest, self.config.keep_last, self.config.keep_every):
            try:
                manifest.delete(self.checkpoints, step, self.attempt)
            except OSError as error:
                print(f"could not delete {manifest.checkpoint_name(step)}: {error}", file=sys.stderr, flush=True)


def whole_tensors(model: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes of every tensor of a complete checkpoint, from the whole model on the meta device."""
    with torch.device("meta"):
        whole = Transformer(model)
    shapes = {f"model.{name}": value.shape for name, value in whole.state_dict().items()}
    for name, parameter in whole.named_parameters():
        shapes |= {f"optim.{name}.{moment}": parameter.shape for moment in ("exp_avg", "exp_avg_sq")}
    return shapes


def check_whole(reader: dcp.FileSystemReader, model: ModelConfig) -> None:
    """Every tensor of every stage must be there, and its pieces add up to it: one with some ranks' experts only is not published.

    Raises OSError with the first that is not.
    """
    found = reader.read_metadata().state_dict_metadata
    for name, shape in whole_tensors(model).items():
        entry = found.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise OSError(f"{name} is missing from the checkpoint")
        if entry.size != shape:
            raise OSError(f"{name} has the shape {tuple(entry.size)} in the checkpoint and {tuple(shape)} in the model")
        pieces = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if pieces != shape.numel():
            raise OSError(f"{name} has {pieces} of its {shape.numel()} elements in the checkpoint")
