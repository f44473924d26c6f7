"""`hpcmoe wait RUN`: follow a run until it is over, help it where Slurm would leave it, and exit with its result."""

from __future__ import annotations

import json
import sys
import time

from hpcmoe.cli.words import Parser, add_json, add_run
from hpcmoe.runs.control import LogTail
from hpcmoe.runs.registry import find_run
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.supervise import EXIT_CODES, supervise

INTERRUPTED = 130


def main(argv: list[str]) -> int:
    codes = ", ".join(f"{code} {state}" for state, code in EXIT_CODES.items())
    parser = Parser(
        prog="hpcmoe wait",
        description="Follow a run until it is over. A run that ended although nobody wanted that is submitted again.",
        epilog=f"exit codes: {codes}",
    )
    add_run(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="changes of state only, not the log of rank 0")
    add_json(parser)
    args = parser.parse_args(argv)
    return follow(find_run(args.run), as_json=args.json, quiet=args.quiet)


def follow(run: RunDir, as_json: bool = False, quiet: bool = False) -> int:
    """Supervise the run to its end; returns the exit code of its result. ``as_json``: all but the result goes to stderr."""
    stream = sys.stderr if as_json else sys.stdout

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    def emit(text: str) -> None:
        stream.write(text)
        stream.flush()

    try:
        view = supervise(run, say, None if quiet else LogTail(run, 0, emit))
    except KeyboardInterrupt:
        print(
            f"\nrun {run.run_id} goes on; `hpcmoe wait {run.run_id}` follows it again, `hpcmoe cancel {run.run_id}` ends it",
            file=sys.stderr,
        )
        return INTERRUPTED
    for line in (view.record.finished or {}).get("last_lines") or []:
        say(f"  {line}")
    if as_json:
        print(json.dumps(view.as_json(time.time()), indent=2))
    return EXIT_CODES[view.state]
