"""Text as one array of tokens, with a fingerprint that tells whether a resumed run still reads the same text.

Not for order or batches (hpcmoe.data.order, hpcmoe.data.loader).
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcmoe.config.schema import DataConfig
from hpcmoe.data.tokenizer import encode_documents
from hpcmoe.errors import UserError, unknown_name

SOURCES = ("python_stdlib", "text")
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    tokens: np.ndarray  # uint16, one dimension
    fingerprint: str  # sha256 of the bytes and of where documents end
    description: str  # for people: what it is, how many files


def load_corpus(data: DataConfig) -> Corpus:
    """Read all documents, in an order that depends on their names alone."""
    if data.source == "python_stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _stdlib_files(root)
        what = f"standard library of Python {platform.python_version()}"
    elif data.source == "text":
        root, files = _text_files(data)
        what = str(root)
    else:
        raise UserError(unknown_name("data.source", data.source, SOURCES))
    documents = _read(files, data.max_bytes)
    if not documents:
        raise UserError(f"no text found in {root} (data.source={data.source}, data.glob={data.glob})")
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    size = sum(map(len, documents)) / 1e6
    return Corpus(encode_documents(documents), digest.hexdigest(), f"{what}, {len(documents)} files, {size:.1f} MB")


def _stdlib_files(root: Path) -> list[Path]:
    """Every .py below ``root`` that belongs to Python itself, by relative path in byte order (no locale)."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STDLIB]  # site-packages may hold 100 000 files
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: os.fsencode(os.path.relpath(path, root)))


def _text_files(data: DataConfig) -> tuple[Path, list[Path]]:
    if data.path is None:
        raise UserError("data.source=text needs data.path, a file or a directory")
    root = Path(data.path).expanduser()
    if root.is_file():
        return root, [root]
    if not root.is_dir():
        raise UserError(f"data.path={data.path} does not exist")
    found = [path for path in root.glob(data.glob) if path.is_file()]
    return root, sorted(found, key=lambda path: os.fsencode(os.path.relpath(path, root)))


def _read(files: list[Path], max_bytes: int | None) -> list[bytes]:
    """Non-empty files' bytes, cut after ``max_bytes`` in all."""
    documents: list[bytes] = []
    left = max_bytes if max_bytes is not None else None
    for path in files:
        if left is not None and left <= 0:
            break
        try:
            document = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if left is not None:
            document = document[:left]
            left -= len(document)
        if document:
            documents.append(document)
    return documents
