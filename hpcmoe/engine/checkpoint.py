"""Saving: torch.distributed.checkpoint into a directory beside, checksums, manifest, rename. In a thread, or blocking to leave.

Not for loading (hpcmoe.engine.restore) nor for the on-disk rules (hpcmoe.engine.manifest).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
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

T = TypeVar("T")
SLOWEST_SAVE = timedelta(hours=1)  # how much later than the first rank the last one may have written its files


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


class SaveError(Exception):
    """A checkpoint was not published; the words are for people."""


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
    unsound: set[int] = field(default_factory=set)  # steps whose checkpoints were passed over as damaged
    save_seconds: list[float] = field(default_factory=list)  # from the start of each save to its name; rank 0's
    failed_in_a_row: int = field(default=0, init=False)
    group: dist.ProcessGroup = field(init=False)

    def __post_init__(self) -> None:
        group = dist.new_group(backend="gloo", timeout=SLOWEST_SAVE)  # never the training's: a thread uses it while steps run
        assert group is not None
        self.group = group
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._flight: tuple[int, Future[None]] | None = None

    def start(self, stages: Stages, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Save in the background; the caller is held for the copy only, and for an earlier save that is not done yet."""
        begun = time.monotonic()
        self.wait()
        state = staged(collect_state(stages, optimizer, progress))
        blocked = time.monotonic() - begun
        self._flight = (progress.step, self._pool.submit(self._write, state, progress.step, begun, blocked))
        if not self.config.asynchronous:
            self.wait()

    def save_durably(self, stages: Stages, optimizer: torch.optim.Optimizer, progress: Progress) -> str | None:
        """Return when the current step is in a published checkpoint, or the reason why it cannot be. None is written twice."""
        self.wait()
        if self.saved_step == progress.step:
            return None
        state = collect_state(stages, optimizer, progress)
        self._flight = (progress.step, self._pool.submit(self._write, state, progress.step, time.monotonic(), None))
        return self.wait()

    def poll(self) -> None:
        """Notice a background save that is done, so that its failure is told when it happens."""
        if self._flight is not None and self._flight[1].done():
            self.wait()

    def in_flight(self) -> bool:
        return self._flight is not None

    def wait(self) -> str | None:
        """Until no save is in flight. A failed one is told and journalled, and its reason returned: training goes on."""
        if self._flight is None:
            return None
        step, future = self._flight
        self._flight = None
        try:
            future.result()
        except Exception as error:
            reason = str(error) if isinstance(error, SaveError) else in_one_line(error)
            self.failed_in_a_row += 1
            self._tell_failure(step, reason)
            return reason
        self.saved_step, self.failed_in_a_row = step, 0
        self.unsound.discard(step)
        return None

    def _write(self, state: dict[str, Any], step: int, begun: float, blocked: float | None) -> None:
        """Raises SaveError on all ranks if any rank fails in any part; unfinished files are deleted, as space may be short."""
        rank = dist.get_rank()
        tmp = self.checkpoints / manifest.scrap_name(step, self.attempt, "tmp")
        try:
            self._together(lambda: _make_fresh(tmp) if rank == 0 else None)
            _write_shards(state, tmp, self.group)
            records = [record for part in self._together(lambda: _own_files(tmp, rank)) for record in part]
            told = {name: value for name, value in state["progress"].items() if name != "callbacks"}
            facts = self.facts | told | {"attempt": self.attempt}
            self._together(lambda: self._publish(tmp, step, records, facts) if rank == 0 else None)
        except SaveError:
            if rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            raise
        if rank == 0:
            self._tell(step, sum(record.bytes for record in records), time.monotonic() - begun, blocked)
            self._prune(step)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """``work()`` of every rank, by rank. Raises SaveError on all of them, with the first reason, if one failed."""
        try:
            mine: tuple[Any, str | None] = (work(), None)
        except Exception as error:
            mine = (None, in_one_line(error))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine, group=self.group)
        for rank, (_, reason) in enumerate(gathered):
            if reason is not None:
                raise SaveError(f"rank {rank}: {reason}")
        return [result for result, _ in gathered]

    def _publish(self, tmp: Path, step: int, records: list[manifest.FileRecord], facts: dict[str, Any]) -> None:
        check_whole(dcp.FileSystemReader(tmp), self.model)
        manifest.publish(self.checkpoints, step, self.attempt, records, facts)

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
        self.save_seconds.append(seconds)

    def _tell_failure(self, step: int, reason: str) -> None:
        if self.journal is None:
            return
        name = manifest.checkpoint_name(step)
        self.journal.append("save_failed", step=step, checkpoint=name, reason=reason, in_a_row=self.failed_in_a_row)
        newest = (
            "there is no checkpoint yet" if self.saved_step is None else f"the newest checkpoint is of step {self.saved_step}"
        )
        again = f" ({self.failed_in_a_row} saves in a row have failed)" if self.failed_in_a_row > 1 else ""
        print(f"SAVE FAILED: step {step} is not saved: {reason}; {newest}{again}", file=sys.stderr, flush=True)

    def _prune(self, newest: int) -> None:
        """What cannot be deleted now goes with the next save: a published checkpoint does not fail for it."""
        try:
            steps = manifest.published(self.checkpoints)
            unsound = self.unsound - {newest}
            for step in manifest.to_delete(steps, newest, self.config.keep_last, self.config.keep_every, unsound):
                manifest.delete(self.checkpoints, step, self.attempt)
        except OSError as error:
            print(f"an old checkpoint could not be deleted: {error}", file=sys.stderr, flush=True)


def _make_fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_shards(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Each rank's tensors into files of its own, synced. A failure of one rank is raised on all, as SaveError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)
        writer = dcp.FileSystemWriter(folder, thread_count=1, sync_files=True)
        try:
            dcp.save(state, storage_writer=writer, process_group=group)
        except CheckpointException as error:  # a BaseException of torch's: nobody who catches Exception would see it
            raise SaveError(first_failure(error)) from error


def _own_files(folder: Path, rank: int) -> list[manifest.FileRecord]:
    own = [name for name in os.listdir(folder) if name.startswith(f"__{rank}_") or (rank == 0 and name == ".metadata")]
    return manifest.record_files(folder, own)


def first_failure(error: BaseException) -> str:
    """In one line; of a collective failure the lowest rank's reason."""
    if not isinstance(error, CheckpointException):
        return str(error)
    if not error.failures:
        return in_one_line(error)
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {in_one_line(cause)}"


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


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
