"""Figures found by searching bytes are those that reading every line gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.runs.figures import Figure, figure_names, figures_among, read_figures, recent_median

VALUE = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-5, 5))


def line(step: int, attempt: str, loss: Any, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "skipped": None, "aux_loss": 1.5, "attempt": attempt, "t": 1.0, **more}


def data_of(lines: list[dict[str, Any]], torn: str = "") -> bytes:
    return ("".join(json.dumps(each) + "\n" for each in lines) + torn).encode()


def by_reading(lines: list[dict[str, Any]], name: str) -> dict[str, Figure]:
    """The plain way: every line as JSON; what a later attempt did again is replaced."""
    standing: dict[int, Any] = {}
    writer = None
    for each in lines:
        if each["attempt"] != writer:
            writer, standing = each["attempt"], {step: value for step, value in standing.items() if step < each["step"]}
        standing[each["step"]] = each[name]
    values = [value for value in standing.values() if value is not None]
    return {name: Figure(values[-1], min(values), max(values))} if values else {}


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(VALUE, min_size=1, max_size=6)), max_size=4))
def test_figures_are_those_that_reading_every_line_gives(tries: list[tuple[int, list[Any]]]) -> None:
    lines = [
        line(back + number, f"7.{attempt}", value)
        for attempt, (back, values) in enumerate(tries)
        for number, value in enumerate(values, 1)
    ]
    attempts = [f"7.{attempt}" for attempt in range(len(tries) + 1)]  # the last one has made no step yet
    assert figures_among(data_of(lines), ["loss"], attempts) == by_reading(lines, "loss")


def test_a_number_that_was_torn_is_no_number() -> None:
    torn = '{"step": 2, "loss": 1'
    assert figures_among(data_of([line(1, "7.0", 15.25)], torn), ["loss"])["loss"].lowest == 15.25


def test_steps_that_were_done_again_are_told_though_the_first_try_ended_inside_a_line() -> None:
    first = data_of([line(1, "7.0", 9.0), line(2, "7.0", 1.0)], '{"step": 3, "loss": 0.5, "atte')
    again = b"\n" + data_of([line(2, "7.1", 4.0), line(3, "7.1", 5.0)])
    assert figures_among(first + again, ["loss"], ["7.0", "7.1"]) == {"loss": Figure(5.0, 4.0, 9.0)}


def test_words_of_a_log_are_not_taken_for_figures() -> None:
    lines = [line(1, "7.0", 2.5, skipped='"loss": 1.0, and "attempt": "7.1"'), line(2, "7.0", 2.25)]
    assert figures_among(data_of(lines), ["loss"], ["7.0", "7.1"]) == {"loss": Figure(2.25, 2.25, 2.5)}


def test_a_figure_that_no_line_has_is_not_there(tmp_path: Path) -> None:
    assert figures_among(data_of([line(1, "7.0", None)]), ["loss", "los", "aux_loss"]) == {"aux_loss": Figure(1.5, 1.5, 1.5)}
    assert read_figures(tmp_path / "none.jsonl", ["loss"]) == {}


def test_the_speed_is_the_median_of_the_newest_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert recent_median(path, "tokens_per_s") is None
    early = [line(step, "7.0", 1.0, tokens_per_s=1.0) for step in range(1000)]
    path.write_bytes(data_of(early + [line(step, "7.0", 1.0, tokens_per_s=50.0 + step % 3) for step in range(1000, 2000)]))
    assert recent_median(path, "tokens_per_s") == 51.0


def test_runs_are_compared_by_what_their_lines_have(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    more = {"tokens": 4, "precision": "fp32", "ok": True, "mfu": None, "eval_loss": None, "accuracy": 0.5}
    path.write_bytes(data_of([line(1, "7.0", None, **more)]))
    assert figure_names(path) == ["loss", "aux_loss", "eval_loss", "accuracy"]
