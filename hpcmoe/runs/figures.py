"""What metrics.jsonl says as a whole: of each figure the lowest, the highest and the newest value, and after which step.

For tables of a thousand runs: bytes are searched, which takes a tenth of the time of reading each line as JSON. A run's story is
hpcmoe.runs.story's.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpcmoe.runs.journal import last_json_line

TAIL_BYTES = 1 << 12
RECENT_BYTES = 1 << 16  # about 130 steps: enough for a median that no slow step moves
_NUMBER = rb"(-?[0-9][-+0-9.eE]*)"
# Not numbers that somebody would compare runs by.
NO_FIGURES = frozenset({"step", "eval_step", "t", "tokens", "batch_tokens", "skipped_steps", "seconds", "peak_tflops", "lr"})
UPWARDS = frozenset({"tokens_per_s", "mfu"})  # of all other figures the lowest value is the best


@dataclass(frozen=True)
class Figure:
    """One figure of a run over all the steps that it stands on."""

    last: float
    lowest: float
    highest: float


def read_figures(metrics: Path, names: Iterable[str], attempts: Sequence[str] = ()) -> dict[str, Figure]:
    """Those of ``names`` that the file has a value of; an absent file has none."""
    try:
        return figures_among(metrics.read_bytes(), names, attempts)
    except FileNotFoundError:
        return {}


def figures_among(data: bytes, names: Iterable[str], attempts: Sequence[str] = ()) -> dict[str, Figure]:
    """Those of ``names`` that these lines have a value of. ``attempts``: the run's.

    Steps that a later attempt did again count as that attempt did them.
    """
    kept = _standing(data, attempts)
    found = {name: [float(text) for piece in kept for text in _pattern(name).findall(piece)] for name in names}
    return {name: Figure(values[-1], min(values), max(values)) for name, values in found.items() if values}


def recent_median(metrics: Path, name: str) -> float | None:
    """The median of a figure over the newest steps."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - RECENT_BYTES))
            values = [float(text) for text in _pattern(name).findall(file.read())]
    except FileNotFoundError:
        return None
    return statistics.median(values) if values else None


def figure_names(metrics: Path) -> list[str]:
    """What the newest line has that runs may be compared by, in its order. An evaluation's loss is not in every line."""
    line = last_json_line(metrics) or {}
    return [
        name
        for name, value in line.items()
        if name not in NO_FIGURES and (name.endswith("loss") if value is None else _is_number(value))
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def _pattern(name: str) -> re.Pattern[bytes]:
    """A figure's value. What ends it must be there, too: the last line may be torn inside a number."""
    return re.compile(rb'"%s": %s[,}]' % (re.escape(name.encode()), _NUMBER))


_STEP = re.compile(rb'"step": (\d+)[,}]')


def _standing(data: bytes, attempts: Sequence[str]) -> list[bytes]:
    """The file without what was done again later: an attempt continues from a checkpoint; what came after it is gone."""
    starts = sorted(start for attempt in attempts if (start := _first_line_of(data, attempt)) is not None)
    if len(starts) < 2:
        return [data]
    kept: list[bytes] = []
    limit: int | None = None  # the first step that a later attempt did
    for start, end in reversed(list(zip(starts, [*starts[1:], len(data)], strict=True))):
        piece = data[start:end]
        first = _STEP.search(piece)
        if limit is not None and _last_step(piece) >= limit:
            again = next((match for match in _STEP.finditer(piece) if int(match[1]) >= limit), None)
            piece = piece[: piece.rfind(b"\n", 0, again.start()) + 1] if again else piece
        kept.insert(0, piece)
        if first is not None:
            limit = int(first[1]) if limit is None else min(limit, int(first[1]))
    return kept


def _last_step(piece: bytes) -> int:
    """Of an attempt's lines; its steps ascend, and its last line may be torn. 0: they have none."""
    steps = _STEP.findall(piece, max(0, len(piece) - TAIL_BYTES))
    return int(steps[-1]) if steps else 0


def _first_line_of(data: bytes, attempt: str) -> int | None:
    """Where the attempt's lines begin; None: it wrote none."""
    at = data.find(b'"attempt": "%s"' % attempt.encode())
    return None if at < 0 else data.rfind(b"\n", 0, at) + 1
