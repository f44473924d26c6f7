"""Is this place fit for run directories? Writes, links, locks, renames and syncs in a folder of its own, and removes it."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpcmoe.files import write_atomic
from hpcmoe.locks import file_lock
from hpcmoe.slurm.probe import Finding

BLOCK_BYTES, BLOCKS = 4 << 20, 8
SMALL_SYNCS = 5
SLOW_SYNC_S, SLOW_WRITE_MB_S = 0.25, 50.0
LITTLE_FREE_BYTES, FEW_INODES = 50e9, 100_000
# Visible on one host only, as a rule. Where a site exports one of them, --job tells.
OF_ONE_HOST = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs"})
TOPIC = "run root"


def check_root(root: Path, with_slurm: bool) -> list[Finding]:
    """What there is to say of ``root``; where it does not exist yet, of the nearest folder above that does."""
    place = next(folder for folder in (root, *root.parents) if folder.is_dir())
    kind = file_system(place)
    found = [
        Finding(TOPIC, "ok", f"{root}" + ("" if place == root else f" (not there yet; {place} was looked at)") + f", {kind}")
    ]
    if with_slurm and kind in OF_ONE_HOST:
        says = f"{kind} is mostly of one host, and every node must see the runs (`hpcmoe doctor --job` looks)"
        found.append(Finding(TOPIC, "warn", says, "set HPCMOE_RUNS to a folder on the shared file system"))
    found.append(_space(place))
    try:
        folder = Path(tempfile.mkdtemp(dir=place, prefix=".hpcmoe-doctor-"))
    except OSError as error:
        return [*found, Finding(TOPIC, "bad", f"no folder can be made there: {error}", "set HPCMOE_RUNS to a place of yours")]
    try:
        return [*found, *_try_out(folder)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _space(place: Path) -> Finding:
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    words = f"{free / 1e9:.0f} GB free" + (f", {disk.f_favail} files" if disk.f_favail else "")
    if free < LITTLE_FREE_BYTES or 0 < disk.f_favail < FEW_INODES:
        return Finding(TOPIC, "warn", f"{words}; quotas are not in it", "make room, or set HPCMOE_RUNS elsewhere")
    return Finding(TOPIC, "ok", f"{words}; quotas are not in it (lfs quota, mmlsquota or quota tell)")


def _try_out(folder: Path) -> list[Finding]:
    found = []
    for what, work, level, why in (
        ("an exclusive link", _link, "bad", "two jobs could train one run"),
        ("a lock (flock)", _lock, "warn", "two supervisors could work at once"),
        ("a rename over a file that is there", _rename, "bad", "checkpoints could not be published"),
        ("two writers at the end of one file", _append, "bad", "the journal could lose lines"),
    ):
        problem = _problem(work, folder)
        if problem is not None:
            found.append(
                Finding(TOPIC, level, f"{what} does not work: {problem}; {why}", "set HPCMOE_RUNS to another file system")
            )
    if not found:
        found.append(Finding(TOPIC, "ok", "exclusive links, locks, renames and appending work"))
    return [*found, _speed(folder)]


def _problem(work: Callable[[Path], str | None], folder: Path) -> str | None:
    try:
        return work(folder)
    except OSError as error:
        return str(error)


def _link(folder: Path) -> str | None:
    for name in ("a", "b"):
        (folder / name).write_text(name)
    os.link(folder / "a", folder / "claim")
    try:
        os.link(folder / "b", folder / "claim")
    except FileExistsError:
        return None
    return "a second link took the place of the first"


def _lock(folder: Path) -> str | None:
    with file_lock(folder / "lock") as first, file_lock(folder / "lock") as second:
        return None if first and not second else "a second one gets it, too"


def _rename(folder: Path) -> str | None:
    for text in ("old", "new"):
        write_atomic(folder / "renamed", text)
    return None if (folder / "renamed").read_text() == "new" else "the old file is still there"


def _append(folder: Path) -> str | None:
    files = [os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) for _ in range(2)]
    try:
        for number in range(8):
            os.write(files[number % 2], b"%d\n" % number)
    finally:
        for file in files:
            os.close(file)
    lines = (folder / "journal").read_bytes()
    return None if lines == b"".join(b"%d\n" % number for number in range(8)) else "lines are lost or out of order"


def _speed(folder: Path) -> Finding:
    syncs = []
    for number in range(SMALL_SYNCS):
        began = time.perf_counter()
        write_atomic(folder / f"small{number}", "x")
        syncs.append(time.perf_counter() - began)
    block = os.urandom(BLOCK_BYTES)
    began = time.perf_counter()
    with (folder / "large").open("wb") as file:
        for _ in range(BLOCKS):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    rate = BLOCK_BYTES * BLOCKS / 1e6 / (time.perf_counter() - began)
    sync = statistics.median(syncs)
    says = f"one process writes {rate:.0f} MB/s; a small file is safe on disk after {1000 * sync:.0f} ms"
    if sync > SLOW_SYNC_S or rate < SLOW_WRITE_MB_S:
        return Finding(TOPIC, "warn", f"{says}; saving will be slow", "a larger checkpoint.interval, or a faster file system")
    return Finding(TOPIC, "ok", says)


def file_system(place: Path) -> str:
    """The type of the file system that ``place`` lies on (/proc/mounts); "unknown" where that is not to be read."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    mounts = [line.split() for line in lines]
    real = place.resolve()
    at = {row[1].encode().decode("unicode_escape"): row[2] for row in mounts if len(row) > 2}
    return next((at[str(folder)] for folder in (real, *real.parents) if str(folder) in at), "unknown")
