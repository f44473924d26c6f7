"""How `hpcmoe watch` looks: rows of the board as rich renderables for a terminal of any width from 80 columns. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcmoe.cli.words import ago
from hpcmoe.runs.board import Line
from hpcmoe.text import duration

COLOURS = {"RUNNING": "green", "QUEUED": "yellow", "UNKNOWN": "magenta", "STOPPED": "cyan", "FAILED": "red", "COMPLETED": "dim"}
KEYS = "j/k select   l log   c cancel   q quit"
AROUND_THE_ROWS = 6  # lines of a screen that are not runs: two above, the details and the keys below
STEP_WIDTH = 11
REASON_FROM = 100  # columns of a terminal from which the reason stands in the table


def frame(
    lines: Sequence[Line], now: float, width: int, rows: int, selected: int | None = None, says: str = ""
) -> RenderableType:
    """The table; with ``selected`` (an index) also that run's details and the keys. ``rows``: as many runs at most."""
    first = 0 if selected is None else min(max(0, selected - rows // 2), max(0, len(lines) - rows))
    shown = lines[first : first + rows]
    parts: list[RenderableType] = [_heading(lines, now, first, len(shown)), _table(shown, now, width, selected, first)]
    if not lines:
        parts[1] = Text("no runs yet; `hpcmoe submit` starts one")
    if selected is not None:
        details = _details(lines[selected], now) if lines else []
        parts += [Text(""), *(Text(line, no_wrap=True, overflow="ellipsis") for line in details[:2])]
        parts += [Text("")] * (2 - len(details[:2]))
        parts.append(Text(says or KEYS, style="bold" if says else "dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _heading(lines: Sequence[Line], now: float, first: int, shown: int) -> Text:
    counts = Counter(line.run.state for line in lines)
    order = dict.fromkeys(line.run.state for line in lines)
    part = f"   {first + 1} to {first + shown} of {len(lines)} runs" if shown < len(lines) else ""
    words = ", ".join(f"{counts[state]} {state}" for state in order)
    return Text(f"{time.strftime('%H:%M:%S', time.localtime(now))}  {words}{part}", no_wrap=True, overflow="ellipsis")


def _table(shown: Sequence[Line], now: float, width: int, selected: int | None, first: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    spare = max(0, width - 80)
    table.add_column("", width=1)
    table.add_column("RUN", width=6, no_wrap=True)
    table.add_column("NAME", width=9 + min(20, spare // 3), no_wrap=True, overflow="ellipsis")
    table.add_column("STATE", width=9, no_wrap=True)
    table.add_column("ATT", width=3, justify="right")
    table.add_column("STEP", width=STEP_WIDTH, justify="right", no_wrap=True, overflow="crop")
    table.add_column("TOK/S", width=5, justify="right", no_wrap=True)
    table.add_column("MFU", width=4, justify="right")
    table.add_column("LOSS", width=6, justify="right", no_wrap=True, overflow="crop")
    table.add_column("GPU-H", width=5, justify="right", no_wrap=True)
    table.add_column("LEFT", width=10, justify="right", no_wrap=True)
    wide = width >= REASON_FROM
    if wide:
        table.add_column("REASON", no_wrap=True, overflow="ellipsis")
    for index, line in enumerate(shown, first):
        cells = _cells(line, now, index == selected)
        style = "reverse" if index == selected else ""
        table.add_row(*cells, *([line.run.reason or ""] if wide else []), style=style)
    return table


def _cells(line: Line, now: float, selected: bool) -> list[Text | str]:
    run = line.run
    goes = run.state in ("RUNNING", "COMPLETED")  # of a run that waits the last speed says nothing
    return [
        ">" if selected else "",
        run.run_id,
        run.name,
        Text(run.state, style=COLOURS.get(run.state, "")),
        str(run.attempt_count),
        _step(run.step, run.steps),
        quantity(run.tokens_per_s) if goes and run.tokens_per_s is not None else "-",
        f"{100 * run.mfu:.1f}" if goes and run.mfu is not None else "-",
        "-" if run.loss is None else f"{run.loss:.4f}"[:6],
        quantity(run.gpu_hours) if run.gpu_hours >= 1000 else f"{run.gpu_hours:.1f}",
        _left(line, now),
    ]


def _step(step: int | None, steps: int | None) -> str:
    if step is None:
        return "-"
    whole = f"{step}/{'?' if steps is None else steps}"
    return whole if len(whole) <= STEP_WIDTH or not steps else f"{step} {100 * step // steps}%"


def _left(line: Line, now: float) -> str:
    """Time to the last step; of a run that waits, its place and when Slurm expects it to start."""
    if line.run.left_s is not None:
        return duration(line.run.left_s)
    place = "" if line.place is None else f"#{line.place.place}"
    return f"{place} {when(line.starts, now)}".strip() if line.starts else place


def when(moment: float, now: float) -> str:
    """14:05, or 2 Dec: in local time, for a narrow column."""
    near = abs(moment - now) < 86400
    return time.strftime("%H:%M" if near else "%b%d", time.localtime(moment))


def _details(line: Line, now: float) -> list[str]:
    run = line.run
    job = f"job {run.job_id}" if run.job_id else "no job"
    stepped = f", last step {ago(run.stepped, now)}" if run.stepped else ""
    about = f"{run.run_id} {run.name}: {job}, attempt {run.attempt or '-'}{stepped}"
    if line.place is not None:
        hidden = " (only your own jobs are to be seen)" if line.place.only_own else ""
        about += f", place {line.place.place} of {line.place.of} in the queue{hidden}"
    if line.starts is not None:
        about += f", expected to start {time.strftime('%Y-%m-%d %H:%M', time.localtime(line.starts))}"
    known = f"last known {run.last_known}, {ago(run.unknown_since, now)}; " if run.last_known and run.unknown_since else ""
    return [about, f"{run.state}: {known}{run.reason or 'nothing to say'}" if run.reason or known else run.state]


def quantity(value: float) -> str:
    """Four characters and a letter at most: 987, 12.3k, 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
