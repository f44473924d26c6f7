"""A sweep's points with what became of them: one row a point, for tables, files and ``hpcmoe.load_sweep``.

States come from one look at Slurm for all points, figures from the runs' metrics. Changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpcmoe.errors import UserError, unknown_name
from hpcmoe.runs.choose import Row, Value, in_order, known_column, parse_filter, settings_of, varying
from hpcmoe.runs.figures import UPWARDS, figure_names, read_figures, recent_median
from hpcmoe.runs.glance import Glance, Glancer, glance
from hpcmoe.runs.observe import RunView
from hpcmoe.runs.points import PointView, point_views
from hpcmoe.runs.store import Record
from hpcmoe.runs.sweep import SweepDir, find_sweep

if TYPE_CHECKING:
    from pandas import DataFrame

OWN_FIGURES = ("loss", "eval_loss")  # of hpcmoe's own engine; a command's are those that its log tells
FIRST_COLUMNS = ("state", "run_id", "step", "steps")
WORDS = ("reason", "last_error", "same_as", "job_id", "run_dir")
COLUMNS = ("tokens_per_s", "mfu", "gpu_hours", "attempts", *WORDS)
TAKEN = frozenset({"point", *FIRST_COLUMNS, *COLUMNS})
NO_WORDS = "the ranks left with exit code"


@dataclass(frozen=True)
class PointResult:
    """One point and its run. None: not known, or not so yet."""

    seen: PointView
    glance: Glance | None = None  # None: the run's directory is gone
    last_error: str | None = None  # of a run that FAILED: the last line of the rank that failed
    figures: dict[str, float | None] = field(default_factory=dict)  # by column: loss, best_loss, ...
    tokens_per_s: float | None = None  # the median of the newest steps

    @property
    def index(self) -> int:
        return self.seen.point.index

    @property
    def state(self) -> str:
        return self.seen.state

    @property
    def paused(self) -> bool:
        """By the sweep's early stopping; it may be promoted yet."""
        return self.seen.view is not None and self.seen.view.record.life.paused_at is not None

    @property
    def settings(self) -> dict[str, Value]:
        """The point's overrides as column -> cell."""
        return settings_of(self.seen.point.overrides)

    def facts(self) -> Row:
        """Everything but settings and figures, by column."""
        point, run = self.seen.point, self.glance
        return {
            "point": point.index,
            "state": self.seen.state,
            "run_id": point.result_run,
            "step": run.step if run else None,
            "steps": run.steps if run else None,
            "tokens_per_s": self.tokens_per_s,
            "mfu": run.mfu if run else None,
            "gpu_hours": run.gpu_hours if run else None,
            "attempts": run.attempt_count if run else None,
            "reason": self.seen.reason,
            "last_error": self.last_error,
            "same_as": point.same_as,
            "job_id": run.job_id if run else None,
            "run_dir": run.run_dir if run else None,
        }

    def as_json(self) -> dict[str, Any]:
        overrides = list(self.seen.point.overrides)
        return {"overrides": overrides, "settings": self.settings, **self.facts(), "figures": self.figures}


@dataclass(frozen=True)
class Results:
    """A table of points: each once, in this order."""

    sweep: SweepDir
    points: tuple[PointResult, ...]

    @property
    def sweep_id(self) -> str:
        return self.sweep.sweep_id

    def columns(self) -> list[str]:
        """Point, then overrides, then what became of it."""
        settings = [
            _column(key, self.figure_columns) for key in dict.fromkeys(key for each in self.points for key in each.settings)
        ]
        return ["point", *settings, *FIRST_COLUMNS, *self.figure_columns, *COLUMNS]

    @property
    def figure_columns(self) -> list[str]:
        return list(dict.fromkeys(name for each in self.points for name in each.figures))

    def rows(self) -> list[Row]:
        """One flat row a point; all of them have all columns."""
        columns, figures, rows = self.columns(), self.figure_columns, []
        for each in self.points:
            settings = {_column(key, figures): value for key, value in each.settings.items()}
            cells = settings | each.figures | each.facts()
            rows.append({column: cells.get(column) for column in columns})
        return rows

    def frame(self) -> DataFrame:
        """The rows as a pandas frame. Raises UserError where pandas is not installed; ``rows()`` needs none."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("frame() needs pandas (pip install 'hpcmoe[tables]'); rows() gives the same without it") from error
        return pandas.DataFrame(self.rows(), columns=self.columns())

    def varying(self) -> list[str]:
        """The columns of those overrides that differ between points."""
        figures = self.figure_columns
        return [_column(key, figures) for key in varying([each.settings for each in self.points])]

    def select(self, filters: Sequence[str] = (), sort: str | None = None, descending: bool = False) -> Results:
        """Those points that pass all filters (``state=FAILED``), sorted by a column. Raises UserError for unknown columns."""
        columns, rows = self.columns(), self.rows()
        for text in filters:
            chosen = parse_filter(text, columns)
            rows = [row for row in rows if chosen.keeps(row)]
        if sort is not None:
            known_column(sort, columns, "--sort")
            rows = in_order(rows, sort, descending)
        by_index = {each.index: each for each in self.points}
        return replace(self, points=tuple(by_index[row["point"]] for row in rows))


def _column(key: str, figures: Iterable[str]) -> str:
    """An override that is called like another column gets a prefix."""
    return f"override.{key}" if key in TAKEN or key in figures else key


def load_sweep(word: str = "latest", best: str | None = None, highest: bool = False) -> Results:
    """The results of the sweep that ``word`` names (an id, the beginning of one, ``latest``, a path). Raises UserError.

    ``best``: a figure to give a column ``best_<figure>`` of, as losses have; ``highest``: its highest value is the best.
    """
    return read_results(find_sweep(word), best, highest)


def read_results(sweep: SweepDir, best: str | None = None, highest: bool = False) -> Results:
    """Every point with the figures of its run. Raises UserError when no run has the figure ``best``."""
    points = [_with_figures(each, best, highest) for each in look(sweep).points]
    if best is not None and not any(each.figures.get(f"best_{best}") is not None for each in points):
        records = [each.seen.view.record for each in points if each.seen.view is not None]
        names = list(dict.fromkeys(name for record in records for name in figure_names(record.run.metrics)))
        if best not in names and names:
            raise UserError(f"--best: {unknown_name('figure', best, names)}")
        raise UserError(f"--best {best}: no point of sweep {sweep.sweep_id} has a value of it yet")
    return Results(sweep, tuple(points))


def upwards(figure: str, highest: bool) -> bool:
    """Whether more of it is better."""
    return highest or figure in UPWARDS


def look(sweep: SweepDir, glancer: Glancer | None = None) -> Results:
    """Every point as it is now, without figures: one look at Slurm, and no more of the metrics than their last lines."""
    now = time.time()
    return Results(sweep, tuple(_result(seen, now) for seen in point_views(sweep, glancer or Glancer(sweep.root), now)))


def _result(seen: PointView, now: float) -> PointResult:
    if seen.view is None:
        return PointResult(seen)
    run = glance(seen.view, now)
    said = _last_error(seen.view) if seen.state == "FAILED" else None
    return PointResult(seen, run, said, {"loss": run.loss}, run.tokens_per_s)


def _last_error(view: RunView) -> str | None:
    """What the first rank to fail wrote down of its failure; of a program that writes down nothing, the end of its log."""
    record = view.record
    said = [str(line).strip() for line in (record.finished or {}).get("last_lines") or []]
    details = [event.get("detail") for event in record.events if event["event"] == "attempt_ended"]
    detail = str(details[-1]) if details and details[-1] else None
    if detail is not None and not (said and detail.startswith(NO_WORDS)):
        return detail
    return said[-1] if said else None


def _with_figures(each: PointResult, best: str | None, highest: bool) -> PointResult:
    if each.seen.view is None:
        return each
    record = each.seen.view.record
    if record.last_line is None:
        return replace(each, figures=_figures(record, best, highest))
    return replace(each, figures=_figures(record, best, highest), tokens_per_s=recent_median(record.run.metrics, "tokens_per_s"))


def _figures(record: Record, best: str | None, highest: bool) -> dict[str, float | None]:
    """By column: the newest value of each figure, and the best one of losses and of what was asked for."""
    line, metrics = record.last_line or {}, record.run.metrics
    own = record.planned.get("engine") != "command"
    shown = [name for name in (OWN_FIGURES if own else figure_names(metrics)) if name not in TAKEN]
    names = list(dict.fromkeys([*shown, *([best] if best else [])]))
    found = read_figures(metrics, names, list(record.gist.held)) if line else {}
    cells: dict[str, float | None] = {}
    for name in names:
        figure = found.get(name)
        if figure is None and name not in ("loss", best):
            continue
        if name in shown:
            not_finite = line.get(name, 0) is None and name != "eval_loss"  # of the newest step; evaluations are seldom
            cells[name] = None if figure is None or not_finite else figure.last
        if name == best or name.endswith("loss"):
            up = upwards(name, highest and name == best)
            cells[f"best_{name}"] = None if figure is None else figure.highest if up else figure.lowest
    return cells
