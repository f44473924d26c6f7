"""Names of what lies in a run directory, and how it is written. Knows no Slurm, no torch, no config schema."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` so that a reader or a crash sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(tmp, 0o644)
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")


def read_json(path: Path) -> Any | None:
    """The JSON value in ``path``, or None where there is none (absent or not JSON)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class RunDir:
    """One run's directory. Every path below it is named here and nowhere else."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def overrides(self) -> Path:
        return self.path / "overrides.txt"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def journal(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def script(self) -> Path:
        return self.path / "sbatch" / "attempt.sh"

    @property
    def claim(self) -> Path:
        return self.path / "claim.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, attempt: str) -> Path:
        return self.attempts / attempt

    def verdict(self, attempt: str) -> Path:
        return self.attempt(attempt) / "verdict.json"

    def notice(self, attempt: str) -> Path:
        """Touched by the batch shell when it hears a signal; covers signals that come before a rank's handlers exist."""
        return self.attempt(attempt) / "notice"

    def rank_log(self, attempt: str, rank: int) -> Path:
        return self.attempt(attempt) / f"rank-{rank:04d}.log"
