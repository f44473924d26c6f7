"""Words that the verbs share: common arguments, times. No logic of runs."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from hpcmoe.errors import UserError
from hpcmoe.text import duration


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


def ago(moment: float, now: float) -> str:
    return f"{duration(now - moment)} ago"
