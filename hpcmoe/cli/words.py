"""Words that the verbs share: common arguments, durations, plain tables. No logic of runs."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from hpcmoe.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse, whose complaints are UserErrors: one line, exit code 2, and a JSON document where one was asked for."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog.removeprefix('hpcmoe ')}: {message}; `{self.prog} --help` lists what it takes")


def add_run(parser: argparse.ArgumentParser, required: bool = True) -> None:
    text = "run id, a unique prefix of one, or 'latest'"
    if required:
        parser.add_argument("run", metavar="RUN", help=text)
    else:
        parser.add_argument("run", metavar="RUN", nargs="?", help=text + "; all runs when left out")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout; messages go to stderr")


def positive(text: str) -> float:
    """A number above zero, for argparse."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(text)
    return value


def duration(seconds: float) -> str:
    """1h02m, 3m05s, 12s."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def ago(moment: float, now: float) -> str:
    return f"{duration(now - moment)} ago"


def table(rows: list[list[str]]) -> str:
    """Left-aligned columns, two spaces between; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
