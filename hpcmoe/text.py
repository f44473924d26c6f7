"""Plain text for people: durations, tables, lists of numbers. Stdlib only; for any room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def duration(seconds: float) -> str:
    """1h02m, 3m05s, 12s."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces between; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def number_ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7``: sorted, neighbours together."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def many(count: int, word: str) -> str:
    """``1 point``, ``2 points``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
