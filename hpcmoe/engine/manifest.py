"""What makes a directory a checkpoint: a manifest, written last, that lists every file with its size and checksum. Stdlib only.

Also the names of checkpoints and which of them to keep. Not for tensors (hpcmoe.engine.checkpoint).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcmoe.files import read_json, sync, write_json

MANIFEST = "manifest.json"
FORMAT = 1
PUBLISHED = re.compile(r"step-(\d{8,})")
SCRAP = re.compile(r"\.step-(?P<step>\d{8,})\.(?P<attempt>.+)\.(?P<kind>tmp|old|gone)")


@dataclass(frozen=True)
class FileRecord:
    name: str
    bytes: int
    crc32: int


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def scrap_name(step: int, attempt: str, kind: str) -> str:
    """A directory that is not a checkpoint: ``tmp`` being written, ``old`` being replaced, ``gone`` being deleted."""
    return f".{checkpoint_name(step)}.{attempt}.{kind}"


def published(checkpoints: Path) -> list[int]:
    """Steps that have a checkpoint directory, newest first; whether it is whole is another question."""
    return sorted((int(match.group(1)) for name in _names(checkpoints) if (match := PUBLISHED.fullmatch(name))), reverse=True)


def checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def record_files(directory: Path, names: Iterable[str]) -> list[FileRecord]:
    """Size and checksum of each file, after it reached the disk."""
    records = []
    for name in sorted(names):
        path = directory / name
        sync(path)
        records.append(FileRecord(name, path.stat().st_size, checksum(path)))
    return records


def publish(checkpoints: Path, step: int, attempt: str, records: list[FileRecord], facts: dict[str, Any]) -> None:
    """Write the manifest and rename: from then on the checkpoint outlives a crash. An older one of this step is replaced."""
    tmp, final = checkpoints / scrap_name(step, attempt, "tmp"), checkpoints / checkpoint_name(step)
    files = {record.name: {"bytes": record.bytes, "crc32": record.crc32} for record in records}
    write_json(tmp / MANIFEST, {"format": FORMAT, "step": step, **facts, "files": files})
    sync(tmp)
    old = checkpoints / scrap_name(step, attempt, "old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    try:
        os.rename(tmp, final)
    except OSError:
        if old.exists():
            os.rename(old, final)  # a save that fails takes nothing away
        raise
    sync(checkpoints)
    shutil.rmtree(old, ignore_errors=True)


def adopt_scraps(checkpoints: Path) -> list[str]:
    """Finish what a killed ``publish`` left: whole ones that lack only their name get it, replaced ones come back. Their names.

    For the start of an attempt, before it looks for the newest checkpoint: no other attempt may be writing.
    """
    adopted = []
    scraps = [(match, name) for name in _names(checkpoints) if (match := SCRAP.fullmatch(name))]
    for kind in ("tmp", "old"):  # where both are left, what was to come is newer than what was to go
        for match, name in scraps:
            final = checkpoints / checkpoint_name(int(match.group("step")))
            if match.group("kind") != kind or final.exists():
                continue
            manifest = read_manifest(checkpoints / name)
            if isinstance(manifest, str) or damage(checkpoints / name, manifest["files"], full=False) is not None:
                continue
            with contextlib.suppress(OSError):
                os.rename(checkpoints / name, final)
                adopted.append(final.name)
    return adopted


def _names(checkpoints: Path) -> list[str]:
    return sorted(os.listdir(checkpoints)) if checkpoints.is_dir() else []


def read_manifest(directory: Path) -> dict[str, Any] | str:
    """The manifest, or the reason why this is no checkpoint."""
    manifest = read_json(directory / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} is missing or not JSON"
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or not manifest["files"]:
        return f"{MANIFEST} lists no files"
    if manifest.get("format") != FORMAT:
        return f"{MANIFEST} has format {manifest.get('format')}, this version reads {FORMAT}"
    named = PUBLISHED.fullmatch(directory.name)
    if named and manifest.get("step") != int(named.group(1)):
        return f"{MANIFEST} is of step {manifest.get('step')}"
    return manifest


def damage(directory: Path, files: dict[str, Any], full: bool) -> str | None:
    """The first thing wrong with ``files`` (a part of a manifest's); None: nothing. ``full``: checksums too."""
    for name, record in sorted(files.items()):
        path = directory / name
        try:
            size = path.stat().st_size
            if size != record["bytes"]:
                return f"{name} has {size} bytes, the manifest says {record['bytes']}"
            if full and checksum(path) != record["crc32"]:
                return f"{name} does not match its checksum"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, KeyError, TypeError) as error:
            return f"{name} cannot be checked: {error}"
    return None


def to_delete(
    steps: Iterable[int], newest: int, keep_last: int, keep_every: int | None, unsound: Set[int] = frozenset()
) -> list[int]:
    """Which checkpoints go once ``newest`` is published: those before the last few, but for every so many-th.

    ``unsound`` ones, passed over when the run was resumed, do not count among the last few: what is kept is there to be used.
    Steps above ``newest`` are left alone: they were skipped as damaged and are replaced when the run gets there.
    """
    past = sorted((step for step in steps if step <= newest), reverse=True)
    kept = [step for step in past if step not in unsound][:keep_last]
    if len(kept) < keep_last:
        return []
    return [step for step in past if step < kept[-1] and not (keep_every and step % keep_every == 0)]


def delete(checkpoints: Path, step: int, attempt: str) -> None:
    """Rename first: a checkpoint that is half deleted must not look like a damaged one."""
    gone = checkpoints / scrap_name(step, attempt, "gone")
    os.rename(checkpoints / checkpoint_name(step), gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep_scraps(checkpoints: Path, attempt: str) -> None:
    """Remove what earlier attempts left unfinished; what ``attempt`` itself writes stays."""
    for name in _names(checkpoints):
        match = SCRAP.fullmatch(name)
        if match and match.group("attempt") != attempt:
            shutil.rmtree(checkpoints / name, ignore_errors=True)
