"""What a sweep would be, told before anything is submitted: its points, GPU-hours, and how long it takes; or why not. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcmoe.runs.choose import texts_of, varying
from hpcmoe.text import duration, many, number_ranges, table

HOUR_S = 3600.0
MOST_ROWS = 20
MOST_REASONS = 20


@dataclass(frozen=True)
class PlannedPoint:
    """One point, checked. None: not known."""

    index: int
    overrides: tuple[str, ...]
    gpus: int  # 0 where nobody counts them
    hours: float | None  # on its nodes, an estimate
    gpu_hours: float | None  # an estimate
    shape: str  # equal for points that may be elements of one array
    same_as: str | None = None  # a run that has, or will have, its result; the point is not submitted


@dataclass(frozen=True)
class Forecast:
    """The sweep as a whole."""

    points: int  # that are submitted
    skipped: int
    arrays: int
    at_once: int | None  # runs, at most; None: no bound but the machine
    gpu_hours: float
    gpu_hours_unknown: int  # points whose GPU-hours are not known and not counted
    longest_path_h: float  # from the first start to the last end, if each run started as soon as it may
    hours_unknown: int


def longest_path(hours: Sequence[float | None], at_once: int | None) -> float:
    """Hours until all are done, started in this order, ``at_once`` of them at a time; what is not known takes none."""
    known = [each or 0.0 for each in hours]
    if at_once is None or at_once >= len(known):
        return max(known, default=0.0)
    ends = [0.0] * at_once
    for each in known:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def forecast(points: Sequence[PlannedPoint], at_once: int | None, most_elements: int | None) -> Forecast:
    """``most_elements``: of one array (the site's MaxArraySize); None: runs are no elements of arrays here."""
    new = [point for point in points if point.same_as is None]
    shapes: dict[str, int] = {}
    for point in new:
        shapes[point.shape] = shapes.get(point.shape, 0) + 1
    return Forecast(
        points=len(new),
        skipped=len(points) - len(new),
        arrays=0 if most_elements is None else sum(-(-count // most_elements) for count in shapes.values()),
        at_once=at_once,
        gpu_hours=sum(point.gpu_hours or 0.0 for point in new),
        gpu_hours_unknown=sum(point.gpu_hours is None for point in new),
        longest_path_h=longest_path([point.hours for point in new], at_once),
        hours_unknown=sum(point.hours is None for point in new),
    )


def plan_text(points: Sequence[PlannedPoint], told: Forecast, most_rows: int = MOST_ROWS) -> str:
    """A table of the points, no longer than a screen, and the whole in two lines."""
    texts = [texts_of(point.overrides) for point in points]
    keys = varying(texts)
    rows = [["POINT", *keys, "GPUS", "TIME", "GPU-HOURS", ""]]
    for point, text in zip(points[:most_rows], texts, strict=False):
        cells = [text.get(key) or "-" for key in keys]
        skipped = f"not run: the same as run {point.same_as}" if point.same_as else ""
        rows.append([str(point.index), *cells, str(point.gpus or "-"), _time(point.hours), _hours(point.gpu_hours), skipped])
    lines = [table(rows)]
    if len(points) > most_rows:
        lines.append(f"... and {many(len(points) - most_rows, 'more point')}; --dry-run --json lists all")
    common = [f"{key}={value}" for key, value in (texts[0] if texts else {}).items() if key not in keys]
    lines += [f"all points: {' '.join(common)}"] if common and len(points) > 1 else []
    return "\n".join([*lines, *forecast_lines(told)])


def forecast_lines(told: Forecast) -> list[str]:
    how = f" in {many(told.arrays, 'array')}" if told.arrays else ""
    skipped = f"; {told.skipped} more not run, as there are such runs" if told.skipped else ""
    unknown = f" and those of {many(told.gpu_hours_unknown, 'point')}, which are not known" if told.gpu_hours_unknown else ""
    hours = f"about {told.gpu_hours:,.1f} GPU-hours{unknown}" if told.gpu_hours or unknown else "no GPUs are counted here"
    first = f"{many(told.points, 'run')}{how}, {hours}{skipped}"
    if not told.points:
        return [first]
    bound = "all at once" if told.at_once is None or told.at_once >= told.points else f"{told.at_once} at once"
    if told.hours_unknown == told.points:
        return [first, f"longest path, {bound}: not known; neither a speed is on record nor slurm.time given"]
    least = f"at least {duration(told.longest_path_h * HOUR_S)}, as the time of {many(told.hours_unknown, 'point')} is not known"
    path = least if told.hours_unknown else f"about {duration(told.longest_path_h * HOUR_S)}"
    return [first, f"longest path, {bound}: {path}; waiting in the queue not counted"]


def plan_json(points: Sequence[PlannedPoint], told: Forecast) -> dict[str, Any]:
    return {"points": [{**asdict(point), "overrides": list(point.overrides)} for point in points], "forecast": asdict(told)}


def refusal(problems: Sequence[tuple[int, Sequence[str], str]], total: int) -> str:
    """One line that names every point that cannot be run, with its overrides and the reason; equal reasons together."""
    reasons: dict[str, list[tuple[int, Sequence[str]]]] = {}
    for index, overrides, reason in problems:
        reasons.setdefault(reason, []).append((index, overrides))
    told = [f"{_which(alike, total)}: {reason}" for reason, alike in list(reasons.items())[:MOST_REASONS]]
    others = [index for alike in list(reasons.values())[MOST_REASONS:] for index, _ in alike]
    if others:
        told.append(f"and, for {len(reasons) - MOST_REASONS} other reasons, points {number_ranges(others)}")
    if len(told) == 1:
        return told[0]
    return f"{len(problems)} of {many(total, 'point')} cannot be run, and none is submitted: {'; '.join(told)}"


def _which(alike: Sequence[tuple[int, Sequence[str]]], total: int) -> str:
    """``point 3 (optim.lr=1e-4)``, ``points 0-2 (model=tiny)``: with the overrides that they have in common."""
    common = [word for word in alike[0][1] if all(word in overrides for _, overrides in alike)]
    words = f" ({' '.join(common)})" if common else ""
    if len(alike) == 1:
        return f"point {alike[0][0]}{words}"
    if len(alike) == total:
        return f"all {total} points{words}"
    return f"points {number_ranges(index for index, _ in alike)}{words}"


def _time(hours: float | None) -> str:
    return "?" if hours is None else duration(hours * HOUR_S)


def _hours(gpu_hours: float | None) -> str:
    return "?" if gpu_hours is None else f"{gpu_hours:,.1f}"
