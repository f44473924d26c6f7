"""A sweep's results as a file or a document: CSV, JSON, Parquet. What the cells are is hpcmoe.runs.results'."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcmoe.errors import UserError
from hpcmoe.files import write_atomic
from hpcmoe.runs.results import WORDS, Results

if TYPE_CHECKING:
    import pyarrow

WHOLE_NUMBERS = frozenset({"point", "step", "steps", "attempts"})
NUMBERS = frozenset({"tokens_per_s", "mfu", "gpu_hours"})
FORMATS = ("text", "csv", "json", "parquet")
ENDINGS = {".csv": "csv", ".json": "json", ".parquet": "parquet", ".txt": "text"}


def document(results: Results) -> dict[str, Any]:
    """What --json prints."""
    return {
        "sweep_id": results.sweep_id,
        "sweep_dir": str(results.sweep.path),
        "points": [each.as_json() for each in results.points],
    }


def as_text(results: Results, kind: str, table: str) -> str:
    """The whole as csv, json or text (``table``)."""
    if kind == "json":
        return json.dumps(document(results), indent=2) + "\n"
    if kind == "text":
        return table + "\n"
    lines = io.StringIO()
    writer = csv.DictWriter(lines, results.columns(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(results.rows())
    return lines.getvalue()


def format_of(given: str | None, output: Path | None) -> str:
    """What was asked for, else what the file's name says, else text."""
    return given or ENDINGS.get(output.suffix.lower() if output else "", "text")


def write(results: Results, kind: str, output: Path, table: str) -> None:
    """Replace ``output`` with the whole. Raises UserError where it cannot be written."""
    try:
        if kind == "parquet":
            _write_parquet(results, output)
        else:
            write_atomic(output, as_text(results, kind, table))
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror or error}") from error


def _write_parquet(results: Results, output: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("--format parquet needs pyarrow: pip install 'hpcmoe[tables]'; csv and json need nothing") from error
    rows = results.rows()
    columns = {name: [row[name] for row in rows] for name in results.columns()}
    fields = [(name, _arrow_type(pyarrow, name, cells, results.figure_columns)) for name, cells in columns.items()]
    arrays = [pyarrow.array(_cells(kind, columns[name]), kind) for name, kind in fields]
    made = pyarrow.table(arrays, pyarrow.schema(fields, metadata={"sweep_id": results.sweep_id}))
    output.parent.mkdir(parents=True, exist_ok=True)
    file, draft = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        os.close(file)
        parquet.write_table(made, draft)
        os.chmod(draft, 0o644)
        os.replace(draft, output)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _arrow_type(arrow: Any, name: str, cells: list[Any], figures: Sequence[str]) -> pyarrow.DataType:
    """Fixed for our own columns, whatever they hold; of overrides the narrowest type that holds all of them."""
    if name in ("state", "run_id", *WORDS):
        return arrow.string()
    if name in WHOLE_NUMBERS:
        return arrow.int64()
    if name in NUMBERS or name in figures:
        return arrow.float64()
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds == {bool}:
        return arrow.bool_()
    if kinds == {int}:
        return arrow.int64()
    return arrow.float64() if kinds <= {int, float} and kinds else arrow.string()


def _cells(kind: pyarrow.DataType, cells: list[Any]) -> list[Any]:
    """Where an override is a number here and a word there, all of them are words."""
    return [None if cell is None else str(cell) for cell in cells] if str(kind) == "string" else cells
