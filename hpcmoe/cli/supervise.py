"""`hpcmoe supervise`: one process on a login node looks after all runs; --once is for cron. Never imports torch."""

from __future__ import annotations

import json
import sys
import time

from hpcmoe.cli.words import Parser, add_json, positive
from hpcmoe.errors import UserError
from hpcmoe.runs.registry import RUNS_ENV, runs_root
from hpcmoe.runs.supervise import Round, keep

INTERVAL_S = 60.0
LEAST_INTERVAL_S = 5.0


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="hpcmoe supervise",
        description=f"Look after all runs below ${RUNS_ENV} (./runs): lift holds after requeues, submit again what ended "
        "although nobody wanted that. Asks Slurm about all runs together. A second one leaves at once: cron may start it.",
    )
    parser.add_argument("--once", action="store_true", help="one round, then exit")
    parser.add_argument("--interval", type=positive, default=INTERVAL_S, metavar="S", help="seconds between rounds (60)")
    add_json(parser)
    args = parser.parse_args(argv)
    if args.interval < LEAST_INTERVAL_S:
        raise UserError(f"--interval={args.interval:g}: at least {LEAST_INTERVAL_S:g} s; Slurm's controller serves everybody")
    root = runs_root()
    if not root.is_dir():
        raise UserError(f"no runs in {root}; `hpcmoe submit` starts one, ${RUNS_ENV} names another place")
    if not keep(root, args.interval, args.once, _Teller(args.json, args.once)):
        print(f"another supervisor looks after {root} already", file=sys.stderr)
        if args.json:
            print(json.dumps({"open_runs": None, "deeds": [], "problem": "another supervisor is at work"}))
    return 0


class _Teller:
    """Says what each round did; of rounds that did nothing only the first, and every change in what hinders them."""

    def __init__(self, as_json: bool, once: bool) -> None:
        self._as_json, self._once = as_json, once
        self._last: tuple[int, str | None] | None = None

    def __call__(self, done: Round) -> None:
        news = (done.open_runs, done.problem)
        if self._as_json:
            if self._once or done.deeds or news != self._last:
                print(json.dumps(done.as_json(), indent=2 if self._once else None), flush=True)
        else:
            self._tell(done, news)
        self._last = news

    def _tell(self, done: Round, news: tuple[int, str | None]) -> None:
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        for deed in done.deeds:
            print(f"{at} {deed['text']}", flush=True)
        if news != self._last:
            why = f"; Slurm cannot be asked: {done.problem}" if done.problem else ""
            print(f"{at} {done.open_runs} open runs{why}", flush=True)
