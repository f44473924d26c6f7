"""Checkpoints under fire: whatever happens to a save, the newest sound checkpoint is there and is the one that is used."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcmoe.engine import manifest
from tests.engine import fault_cases
from tests.engine.ranks import run_together, write_text


def content(step: int) -> bytes:
    return f"the state after step {step}".encode() * 50


def save(folder: Path, step: int, attempt: str, keep_last: int = 1) -> None:
    """What a rank does with files, without tensors."""
    tmp = folder / manifest.scrap_name(step, attempt, "tmp")
    tmp.mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (tmp / name).write_bytes(content(step))
    manifest.publish(folder, step, attempt, manifest.record_files(tmp, os.listdir(tmp)), {})
    for old in manifest.to_delete(manifest.published(folder), step, keep_last, None):
        manifest.delete(folder, old, attempt)


def newest_sound(folder: Path) -> int | None:
    """As the next attempt finds it, whole and with the content of its step."""
    manifest.adopt_scraps(folder)
    for step in manifest.published(folder):
        directory = folder / manifest.checkpoint_name(step)
        read = manifest.read_manifest(directory)
        if isinstance(read, dict) and manifest.damage(directory, read["files"], full=True) is None:
            assert (directory / "__0_0.distcp").read_bytes() == content(step)
            manifest.sweep_scraps(folder, "the next attempt")
            return step
    return None


def killed_in(work: Callable[[Callable[[int], int]], None], at: int) -> tuple[int, bool]:
    """Run ``work`` in a process that dies at its ``at``-th change of the file system: (the last step it told as safe, killed)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal calls
            writing = event == "open" and isinstance(args[1], str) and args[1] != "r"
            if writing or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work(lambda step: os.write(writer, bytes([step])))
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    told = os.read(reader, 100)
    os.close(reader)
    return (told[-1] if told else 0), os.WIFSIGNALED(status)


@pytest.fixture
def fast_disk(tmp_path: Path) -> Iterator[Path]:
    """Memory, where there is some: fifty processes that sync wait long for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_killed_at_any_change_of_the_file_system_the_newest_checkpoint_that_was_safe_is_there(fast_disk: Path) -> None:
    def saves(folder: Path, safe: Callable[[int], int]) -> None:
        for step in (1, 2, 3):
            save(folder, step, "7.0")
            safe(step)
        save(folder, 3, "7.1")  # again, by an attempt that had passed it over
        safe(3)

    kills, found = 0, []
    for at in range(1, 200):
        folder = fast_disk / str(at)
        folder.mkdir()
        told, killed = killed_in(lambda safe, folder=folder: saves(folder, safe), at)  # type: ignore[misc]
        newest = newest_sound(folder)
        assert (newest or 0) >= told, f"killed at change {at} after step {told} was safe, and {newest} is found"
        assert all(not name.startswith(".step") for name in os.listdir(folder)) or newest is None
        found.append(newest)
        kills += killed
        if not killed:
            break
    assert kills > 25, "the last one ran to its end"
    assert found == sorted(found, key=lambda step: step or 0)
    assert {None, 1, 2, 3} == set(found)


def test_a_checkpoint_torn_at_any_byte_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, "7.0")
    save(tmp_path, 2, "7.0", keep_last=2)
    directory = tmp_path / manifest.checkpoint_name(2)
    for name in os.listdir(directory):
        path = directory / name
        whole = path.read_bytes()
        for size in {0, 1, len(whole) // 2, len(whole.rstrip()) - 1}:
            path.write_bytes(whole[:size])
            assert newest_sound(tmp_path) == 1, f"{name} with {size} of its bytes"
        path.write_bytes(whole)
        assert newest_sound(tmp_path) == 2
        path.unlink()
        assert newest_sound(tmp_path) == 1, f"without {name}"
        path.write_bytes(whole)


def test_the_highest_step_is_the_newest_whatever_clocks_say(tmp_path: Path) -> None:
    save(tmp_path, 100, "7.0", keep_last=5)
    save(tmp_path, 99_999_999, "7.0", keep_last=5)
    save(tmp_path, 100_000_000, "7.0", keep_last=5)
    for step, when in ((100, 4e9), (99_999_999, 2e9), (100_000_000, 1.0)):
        os.utime(tmp_path / manifest.checkpoint_name(step), (when, when))
    assert newest_sound(tmp_path) == 100_000_000, "and not as text is ordered, either"


def test_a_checkpoint_under_another_steps_name_is_none(tmp_path: Path) -> None:
    save(tmp_path, 1, "7.0")
    os.rename(tmp_path / "step-00000001", tmp_path / "step-00000009")
    assert manifest.read_manifest(tmp_path / "step-00000009") == "manifest.json is of step 1"


def test_a_replacement_that_cannot_be_named_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, "7.0")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if ".tmp" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path, 1, "7.1")
    monkeypatch.undo()
    assert manifest.published(tmp_path) == [1]
    assert newest_sound(tmp_path) == 1


def test_damaged_checkpoints_do_not_push_sound_ones_out() -> None:
    assert manifest.to_delete([50, 40, 30, 20, 10], 50, 2, None, {40}) == [20, 10]
    assert manifest.to_delete([50, 40, 30], 50, 2, None, {40, 30}) == [], "fewer sound ones than are to be kept"
    assert manifest.to_delete([60, 50, 40, 30], 60, 2, None, {40}) == [40, 30]


@pytest.mark.multiprocess
def test_saves_that_fail_on_any_rank_in_any_part_leave_training_and_the_old_checkpoint_alone(tmp_path: Path) -> None:
    run_together(2, tmp_path, fault_cases.everything, write_text(tmp_path / "text"), tmp_path)
