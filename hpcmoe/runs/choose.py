"""Choosing among the rows of a table: overrides as typed columns, filters, orders. Pure; knows neither runs nor sweeps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcmoe.errors import UserError, unknown_name

Value = bool | int | float | str | None
Row = dict[str, Any]

_WORDS: dict[str, Value] = {"true": True, "false": False, "null": None}
_FILTER = re.compile(r"(?P<column>.+?)(?P<operator>!=|<=|>=|=|<|>)(?P<text>.*)", re.DOTALL)
_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda cell, bound: cell < bound,
    "<=": lambda cell, bound: cell <= bound,
    ">": lambda cell, bound: cell > bound,
    ">=": lambda cell, bound: cell >= bound,
}


def value_of(text: str) -> Value:
    """What Hydra makes of a value, as far as a cell of a table can hold it; lists and the like stay text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def texts_of(overrides: Iterable[str]) -> dict[str, str]:
    """Overrides as key -> what was typed: ``+optim.lr=1e-4`` is ``optim.lr``; what is deleted keeps its mark (``~key``)."""
    found: dict[str, str] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        found[key.lstrip("+")] = text
    return found


def settings_of(overrides: Iterable[str]) -> dict[str, Value]:
    """The same with each value as a number, a truth or a word."""
    return {key: value_of(text) if text else None for key, text in texts_of(overrides).items()}


@dataclass(frozen=True)
class Filter:
    """``column=a,b`` (one of them), ``column!=a``, ``column<1e-3`` and the like."""

    column: str
    operator: str
    values: tuple[Value, ...]

    def keeps(self, row: Row) -> bool:
        cell = row.get(self.column)
        if self.operator in ("=", "!="):
            return any(_same(cell, value) for value in self.values) is (self.operator == "=")
        return _is_number(cell) and _HOLDS[self.operator](cell, self.values[0])


def parse_filter(text: str, columns: Sequence[str]) -> Filter:
    """Raises UserError for a column that is not there, and for a comparison with something that is no number."""
    match = _FILTER.fullmatch(text)
    if match is None:
        raise UserError(
            f"--filter {text!r} is no filter; COLUMN=VALUE, also with != < <= > >=, as in state=FAILED or optim.lr<=1e-3"
        )
    column, operator, said = match["column"].strip(), match["operator"], match["text"].strip()
    known_column(column, columns, "--filter")
    whole = value_of(said)
    if operator in ("=", "!="):
        return Filter(column, operator, (whole, *(value_of(part.strip()) for part in said.split(","))))
    if not _is_number(whole):
        raise UserError(f"--filter {text!r}: {said!r} is no number")
    return Filter(column, operator, (whole,))


def known_column(column: str, columns: Sequence[str], flag: str) -> None:
    if column not in columns:
        raise UserError(f"{flag}: {unknown_name('column', column, columns)}")


def in_order(rows: Iterable[Row], column: str, descending: bool = False) -> list[Row]:
    """Sorted by one column, numbers before words; rows without a value come last either way. Equal ones keep their order."""
    rows = list(rows)
    there = [row for row in rows if row.get(column) is not None]
    there.sort(key=lambda row: _key(row[column]), reverse=descending)
    return there + [row for row in rows if row.get(column) is None]


def varying(tables: Sequence[Mapping[str, Value]]) -> list[str]:
    """The keys whose values are not the same everywhere, in the order in which they appear first."""
    keys = list(dict.fromkeys(key for settings in tables for key in settings))
    first = tables[0] if tables else {}
    return [key for key in keys if any(key not in one or key not in first or one[key] != first[key] for one in tables)]


def _key(cell: Any) -> tuple[bool, Any]:
    return (False, cell) if isinstance(cell, int | float) else (True, str(cell))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(cell: Any, value: Value) -> bool:
    if _is_number(cell) and _is_number(value):
        return bool(cell == value)
    if isinstance(cell, str) and isinstance(value, str):
        return cell.casefold() == value.casefold()
    return cell is value or (type(cell) is type(value) and cell == value) or (cell is not None and str(cell) == str(value))
