"""What the ranks of test_faults do: save while disks are full, quotas used up, folders read-only; die at any moment of a save."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hpcmoe.engine import manifest
from hpcmoe.engine.restore import load_newest
from hpcmoe.engine.trainer import Trainer
from hpcmoe.runs.journal import read_journal
from tests.engine.callbacks.cases import config_of, same_state, trainer_of


def everything(text: Path, scratch: Path) -> None:
    trainer = trainer_of(config_of(text, 50), scratch / "checkpoints")
    saves_fail_and_training_goes_on(trainer, scratch / "checkpoints")
    a_run_leaves_with_the_checkpoint_it_has(trainer)
    a_save_killed_at_any_moment_loses_nothing(trainer, scratch)
    a_damaged_table_of_contents_is_passed_over(trainer, trainer_of(trainer.config, scratch / "again"), scratch / "checkpoints")
    rank_0_decides_when_all_save_and_leave(trainer, scratch / "checkpoints")


def save(trainer: Trainer) -> str | None:
    """In the background, as training does; why it failed."""
    trainer.checkpointer.start(trainer.stages, trainer.optimizer, trainer._snapshot())
    return trainer.checkpointer.wait()


@contextlib.contextmanager
def refusing(name: str, number: int, rank: int, where: str = "") -> Iterator[None]:
    """``os.name`` fails on ``rank`` with errno ``number``, for paths that contain ``where``."""
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
        if where in path:
            raise OSError(number, os.strerror(number), path)
        return real(*args, **kwargs)

    with mock.patch.object(os, name, call) if dist.get_rank() == rank else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def full_disk(rank: int, bytes_left: int) -> Iterator[None]:
    """No file of ``rank`` may grow beyond so many bytes (the kernel refuses the write, as a full disk does)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def file_in_the_way(folder: Path, step: int) -> Iterator[None]:
    """Where the save wants a folder there is a file, which not even root can write into."""
    with mock.patch.object(shutil, "rmtree"):
        path = folder / manifest.scrap_name(step, "test.0", "tmp")
        if dist.get_rank() == 0:
            path.touch()
        dist.barrier()
        yield
    path.unlink(missing_ok=True)


def faults(folder: Path, step: int) -> dict[str, tuple[Callable[[], contextlib.AbstractContextManager[None]], str]]:
    """By what happens: how, and what the reason must say."""
    return {
        "disk full on rank 1": (lambda: full_disk(1, 4096), "rank 1: "),
        "disk full on rank 0": (lambda: full_disk(0, 4096), "rank 0: "),
        "quota, found when the shard is synced": (lambda: refusing("fsync", errno.EDQUOT, 1, ".distcp"), "quota exceeded"),
        "quota, found when the manifest is synced": (lambda: refusing("fsync", errno.EDQUOT, 0, "manifest"), "quota exceeded"),
        "read-only before": (lambda: refusing("mkdir", errno.EROFS, 0, ".tmp"), "Read-only file system"),
        "read-only meanwhile": (lambda: refusing("rename", errno.EROFS, 0, ".tmp"), "Read-only file system"),
        "a file in the way": (lambda: file_in_the_way(folder, step), "File exists"),
        "an error of the disk": (lambda: refusing("open", errno.EIO, 0, "__0_0"), "Input/output error"),
    }


def saves_fail_and_training_goes_on(trainer: Trainer, folder: Path) -> None:
    trainer.train_step()
    assert save(trainer) is None
    for many, name in enumerate(faults(folder, 0), start=1):
        trainer.train_step()
        fault, says = faults(folder, trainer.progress.step)[name]
        with fault():
            reason = save(trainer)
            dist.barrier()
        assert reason is not None, name
        assert says in reason, f"{name}: {reason}"
        assert trainer.checkpointer.saved_step == 1, name
        assert trainer.checkpointer.failed_in_a_row == many
        dist.barrier()
        assert os.listdir(folder).count("step-00000001") == 1, name
        assert manifest.published(folder) == [1], name
        assert not [one for one in os.listdir(folder) if one.startswith(".step")], f"{name}: the space is free again"
    trainer.train_step()
    assert save(trainer) is None, "and once the disk can be written again it is"
    assert trainer.checkpointer.failed_in_a_row == 0
    if dist.get_rank() == 0:
        events = [event for event in read_journal(folder / "events.jsonl") if event["event"] == "save_failed"]
        assert [event["in_a_row"] for event in events] == list(range(1, len(events) + 1))
        assert len(events) == len(faults(folder, 0))


def a_run_leaves_with_the_checkpoint_it_has(trainer: Trainer) -> None:
    safe = trainer.progress.step
    trainer.train_step()
    with full_disk(1, 4096):
        outcome = trainer._leave("signal")
        assert (outcome.verdict, outcome.step, outcome.source) == ("leave", safe, "signal")
        assert outcome.reason is not None
        assert f"step {safe + 1} could not be saved (rank 1: " in outcome.reason
        with pytest.raises(OSError, match="the last checkpoint cannot be written"):
            trainer._leave(None)
        dist.barrier()


def a_save_killed_at_any_moment_loses_nothing(trainer: Trainer, scratch: Path) -> None:
    """What lies on the disk before each change that rank 0 makes to it is what a kill would leave there."""
    folder, rank = scratch / "checkpoints", dist.get_rank()
    trainer.train_step()
    assert save(trainer) is None
    before = trainer.progress.step
    trainer.train_step()
    moments: list[Path] = []
    watching = rank == 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal watching
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir") or (
            event == "open" and args[1] not in ("r", "rb", None)
        )
        if watching and changes and str(folder) in str(args[0]):
            watching = False
            moments.append(shutil.copytree(folder, scratch / f"moment-{len(moments)}"))
            watching = True

    sys.addaudithook(hook)
    assert save(trainer) is None
    watching = False
    found = [_newest_sound(moment) for moment in moments]
    assert rank or len(found) > 8
    assert set(found) <= {before, before + 1}, found
    assert found == sorted(found), "once the new one is there it stays"


def rank_0_decides_when_all_save_and_leave(trainer: Trainer, folder: Path) -> None:
    """Its plan is the only one; the others hear of it in the step's reduction."""
    done = trainer.progress.step
    if trainer.lead is not None:
        trainer.lead.plan.due = lambda step: step == done + 2  # type: ignore[method-assign]
        trainer.lead.plan.leaving = lambda: trainer.progress.step + 1 == done + 4  # type: ignore[method-assign]
    outcome = trainer.run()
    assert (outcome.verdict, outcome.step, outcome.source) == ("leave", done + 4, "time_limit")
    assert trainer.checkpointer.saved_step == done + 4
    assert manifest.published(folder)[:2] == [done + 4, done + 2]
    dist.barrier()


def _newest_sound(folder: Path) -> int:
    manifest.adopt_scraps(folder)
    for step in manifest.published(folder):
        directory = folder / manifest.checkpoint_name(step)
        read = manifest.read_manifest(directory)
        if isinstance(read, dict) and manifest.damage(directory, read["files"], full=True) is None:
            return step
    return 0


def a_damaged_table_of_contents_is_passed_over(trainer: Trainer, again: Trainer, folder: Path) -> None:
    """Although its size, the only thing that was verified, is right; and what is loaded instead is what was saved."""
    newest, before = manifest.published(folder)[:2]
    dist.barrier()
    if dist.get_rank() == 0:
        path = folder / manifest.checkpoint_name(newest) / ".metadata"
        path.write_bytes(b"\0" * path.stat().st_size)
    dist.barrier()
    unsound: set[int] = set()
    found = load_newest(
        folder,
        "size",
        {"model": "same"},
        again.stages,
        again.optimizer,
        again.checkpointer.group,
        again.checkpointer.journal,
        unsound,
    )
    assert found is not None
    assert (found.step, unsound) == (before, {newest})
    again.progress = found
    again.train_step()
    same_state(again, trainer)
