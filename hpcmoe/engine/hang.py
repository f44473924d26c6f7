"""Signs of life of all ranks, as small files in the attempt's directory, and what they say when nothing moves any more.

Files and not the ranks' store, which dies with the first rank. Pure judgement and file formats; who looks when: the watchdog.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcmoe.engine.callbacks.callback import PHASES, Phase

# Of a process that ended because it hung. The batch shell brings the run back, as after any crash (75: EX_TEMPFAIL).
EXIT_CODE = 75


@dataclass(frozen=True)
class Beat:
    """Where a rank is. ``count`` grows with each sign of life, whether or not the rank moves on."""

    step: int
    phase: Phase
    count: int

    @property
    def place(self) -> tuple[int, int]:
        """Later is greater."""
        return self.step, PHASES.index(self.phase)


@dataclass(frozen=True)
class Behind:
    """A rank that the others wait for. ``silent``: its process itself stands still or is gone."""

    rank: int
    step: int | None  # None: it never gave a sign of life
    phase: Phase | None
    silent: bool

    def __str__(self) -> str:
        where = "no sign of life yet" if self.step is None else f"step {self.step}, {self.phase}"
        return f"rank {self.rank} ({where}{', silent' if self.silent and self.step is not None else ''})"


@dataclass(frozen=True)
class Diagnosis:
    behind: list[Behind]
    text: str  # one line

    def as_json(self) -> dict[str, Any]:
        return {"behind": [asdict(one) for one in self.behind], "reason": self.text}


def write_beat(folder: Path, rank: int, beat: Beat) -> None:
    """In one write and closed at once, so that other nodes read it whole."""
    text = f"{beat.step} {beat.phase} {beat.count}\n".ljust(48)
    fd = os.open(_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(fd, text.encode(), 0)
    finally:
        os.close(fd)


def read_beats(folder: Path, ranks: int) -> dict[int, Beat | None]:
    """Every rank's last sign of life; None where there is none that can be read."""
    return {rank: _read(_file(folder, rank)) for rank in range(ranks)}


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}"


def _read(path: Path) -> Beat | None:
    try:
        step, phase, count = path.read_text().split()
        return Beat(int(step), next(known for known in PHASES if known == phase), int(count))
    except (OSError, ValueError, StopIteration):
        return None


def silent_ranks(before: Mapping[int, Beat | None], after: Mapping[int, Beat | None]) -> set[int]:
    """Ranks without a sign of life between two looks."""
    return {rank for rank, beat in after.items() if beat is None or beat == before[rank]}


def diagnose(beats: Mapping[int, Beat | None], silent: set[int], seconds: float) -> Diagnosis:
    """Who is behind: the silent ranks, and those living ones that are not as far as the farthest."""
    known = {rank: beat for rank, beat in beats.items() if beat is not None}
    farthest = max(known.values(), key=lambda beat: beat.place, default=None)
    behind = []
    for rank, beat in sorted(beats.items()):
        if beat is None:
            behind.append(Behind(rank, None, None, silent=True))
        elif rank in silent or (farthest is not None and beat.place < farthest.place):
            behind.append(Behind(rank, beat.step, beat.phase, rank in silent))
    where = "" if farthest is None else f"step {farthest.step}, {farthest.phase}"
    text = f"no progress for {seconds:.0f} s"
    if not behind:
        text += f"; all {len(beats)} ranks are in {where}"
    else:
        named = ", ".join(str(one) for one in behind[:8]) + (f" and {len(behind) - 8} more" if len(behind) > 8 else "")
        text += f"; behind: {named}" + (f"; the others are in {where}" if len(behind) < len(beats) else "")
    return Diagnosis(behind, text)
