"""`hpcmoe sweep VERB SWEEP`: what becomes of a sweep's points, and what is done to all of them. Never imports torch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpcmoe.cli.sweep_text import overview, results_text, status_text, summary
from hpcmoe.cli.words import Parser, add_json
from hpcmoe.errors import UserError
from hpcmoe.runs.results import Results, look, read_results, upwards
from hpcmoe.runs.supervise import EXIT_CODES
from hpcmoe.runs.sweep import SweepDir, find_sweep, list_sweeps
from hpcmoe.text import many

SWEEP_HELP = "sweep id, a unique prefix of one, or 'latest'"
INTERRUPTED = 130


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    answer: int = args.act(args)
    return answer


def _parser() -> Parser:
    parser = Parser(
        prog="hpcmoe sweep",
        description="Look at a sweep, follow it, end it, bring it back. `hpcmoe submit -m` starts one.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)

    def verb(
        name: str, act: Callable[[argparse.Namespace], int], text: str, sweep_needed: bool = True
    ) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if sweep_needed:
            sub.add_argument("sweep", metavar="SWEEP", help=SWEEP_HELP)
        else:
            sub.add_argument("sweep", metavar="SWEEP", nargs="?", help=SWEEP_HELP + "; all sweeps when left out")
        sub.set_defaults(act=act)
        add_json(sub)
        return sub

    status = verb("status", _status, "every point's state, and why points failed", sweep_needed=False)
    status.add_argument("--all", action="store_true", help="all points, however many; else the table has the length of a screen")
    wait = verb("wait", _wait, "follow all runs until they are over, help them where Slurm would leave them")
    codes = ", ".join(f"{code} {state}" for state, code in EXIT_CODES.items())
    wait.epilog = f"exit codes, of the run that needs a person most: {codes}"
    _add_results(verb("results", _results, "a table of all points: overrides, state, figures, GPU-hours"))
    cancel = verb("cancel", _cancel, "end its runs for good and start no more; what they have saved stays")
    resume = verb("resume", _resume, "continue its runs that stopped, were cancelled, failed or were lost")
    resume.epilog = "Runs that the sweep's early stopping has paused stay so, unless a filter is given and leaves them."
    for sub in (cancel, resume):
        _add_filter(sub)
    throttle = verb("throttle", _throttle, "change how many of its runs may run at once")
    throttle.add_argument("at_once", metavar="N", help="runs at once over all of its arrays, or 'none' for no bound")
    return parser


def _add_filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="only points of which this holds (also != < <= > >=; =a,b: one of them); several: all of them",
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    from hpcmoe.cli.formats import FORMATS

    parser.add_argument("--best", metavar="FIGURE", help="the points with the best FIGURE first (loss, eval_loss, ...)")
    parser.add_argument("--highest", action="store_true", help="with --best: the highest value is the best")
    parser.add_argument("--sort", metavar="COLUMN", help="in the order of a column")
    parser.add_argument("--descending", action="store_true", help="with --sort: the greatest first")
    parser.add_argument("--top", type=int, metavar="N", help="only the first N points")
    _add_filter(parser)
    parser.add_argument("--format", choices=FORMATS, help="text when left out, or what the file's name ends in")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="write into a file")


def _status(args: argparse.Namespace) -> int:
    now = time.time()
    if args.sweep is None:
        seen = [look(sweep) for sweep in list_sweeps()]
        print(json.dumps({"sweeps": [summary(one) for one in seen]}, indent=2) if args.json else overview(seen, now))
        return 0
    results = look(find_sweep(args.sweep))
    if args.json:
        print(json.dumps(summary(results) | {"points": [each.as_json() for each in results.points]}, indent=2))
    else:
        print(status_text(results, now, everything=args.all))
    return 0


def _results(args: argparse.Namespace) -> int:
    from hpcmoe.cli.formats import as_text, document, format_of, write

    _check_results(args)
    results = read_results(find_sweep(args.sweep), args.best, args.highest)
    if args.best:
        results = results.select(sort=f"best_{args.best}", descending=upwards(args.best, args.highest))
    results = results.select(args.filter, args.sort, args.descending)
    if args.top is not None:
        results = Results(results.sweep, results.points[: args.top])
    kind = format_of(args.format, args.output)
    table = results_text(results) if kind == "text" else ""
    if args.output is not None:
        write(results, kind, args.output, table)
        print(f"{many(len(results.points), 'point')} in {args.output}", file=sys.stderr if args.json else sys.stdout)
    elif not args.json:
        print(as_text(results, kind, table), end="")
    if args.json:
        print(json.dumps(document(results), indent=2))
    return 0


def _check_results(args: argparse.Namespace) -> None:
    if args.format == "parquet" and args.output is None:
        raise UserError("--format parquet is for a file: --output FILE")
    if args.highest and not args.best:
        raise UserError("--highest goes with --best FIGURE")
    if args.descending and not args.sort:
        raise UserError("--descending goes with --sort COLUMN")
    if args.sort and args.best:
        raise UserError("--best and --sort do not go together: both say which points come first")
    if args.top is not None and args.top < 1:
        raise UserError(f"--top {args.top}: at least 1")


def _wait(args: argparse.Namespace) -> int:
    return follow(find_sweep(args.sweep), as_json=args.json)


def follow(sweep: SweepDir, as_json: bool = False) -> int:
    """See all runs to their ends; the exit code of the one that needs a person most. ``as_json``: all but the end to stderr."""
    from hpcmoe.runs.supervise import supervise_all, worst_exit_code

    stream = sys.stderr if as_json else sys.stdout

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    try:
        views = supervise_all(sweep.runs(), say, sweep=sweep)
    except KeyboardInterrupt:
        print(f"\nthe runs go on; `hpcmoe sweep wait {sweep.sweep_id}` follows them again", file=sys.stderr)
        return INTERRUPTED
    results = look(sweep)
    if as_json:
        print(json.dumps(summary(results) | {"points": [each.as_json() for each in results.points]}, indent=2))
    else:
        print(status_text(results, time.time()))
    return worst_exit_code(view for view in views if view.record.life.paused_at is None)  # those have done what was asked


def _chosen(results: Results, args: argparse.Namespace) -> Results:
    """The points that the filters leave; duplicates' runs are another sweep's."""
    left = results.select(args.filter)
    return Results(left.sweep, tuple(each for each in left.points if each.seen.point.same_as is None))


def _cancel(args: argparse.Namespace) -> int:
    from hpcmoe.runs.sweep_control import cancel_points

    sweep = find_sweep(args.sweep)
    chosen = _chosen(look(sweep), args)
    done = cancel_points(sweep, chosen.points, whole=not args.filter)
    if args.json:
        print(json.dumps({"sweep_id": sweep.sweep_id, "cancelled": [view.record.run.run_id for view in done]}, indent=2))
    else:
        others = len(chosen.points) - len(done)
        print(f"sweep {sweep.sweep_id}: {many(len(done), 'run')} cancelled" + (f", {others} were over already" if others else ""))
        print(f"`hpcmoe sweep resume {sweep.sweep_id}` would continue them")
    return 0


def _resume(args: argparse.Namespace) -> int:
    from hpcmoe.runs.sweep_control import resume_points

    sweep = find_sweep(args.sweep)
    chosen = _chosen(look(sweep), args).points
    if not args.filter:
        chosen = tuple(each for each in chosen if not each.paused)
    done = resume_points(sweep, chosen)
    if args.json:
        print(json.dumps({"sweep_id": sweep.sweep_id, **done.as_json()}, indent=2))
    else:
        print(*done.lines(), sep="\n")
    return 1 if done.refused else 0


def _throttle(args: argparse.Namespace) -> int:
    from hpcmoe.runs.sweep_control import set_throttle

    sweep = find_sweep(args.sweep)
    at_once = None if args.at_once.lower() in ("none", "null") else _count(args.at_once)
    said = set_throttle(sweep, at_once)
    if args.json:
        print(json.dumps({"sweep_id": sweep.sweep_id, "throttle": at_once, "said": said}, indent=2))
    else:
        bound = "without a bound" if at_once is None else f"at most {at_once} at once"
        print(f"sweep {sweep.sweep_id}: its runs run {bound}", *said, sep="\n")
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{text!r} is no number of runs: 1 or more, or 'none' for no bound")
    return int(text)
