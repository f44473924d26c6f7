"""`hpcmoe logs RUN [-f] [--rank R] [--batch]`: what a rank printed, through all attempts."""

from __future__ import annotations

import json
import sys
import time

from hpcmoe.cli.words import Parser, add_json, add_run
from hpcmoe.errors import UserError
from hpcmoe.runs.control import LogTail, see
from hpcmoe.runs.registry import find_run
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import rank_logs, read_record

FOLLOW_EVERY_S = 1.0
ASK_EVERY_S = 15.0


def main(argv: list[str]) -> int:
    parser = Parser(prog="hpcmoe logs", description="Print a rank's log through all attempts of a run.")
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which rank (default 0)")
    parser.add_argument("--batch", action="store_true", help="the job script's own output instead of a rank's")
    add_json(parser)
    args = parser.parse_args(argv)
    if args.rank < 0:
        raise UserError(f"--rank {args.rank}: ranks are counted from 0")
    run = find_run(args.run)
    if args.json:
        files = batch_logs(run) if args.batch else rank_logs(run, args.rank)
        print(json.dumps({"run_id": run.run_id, "rank": args.rank, "files": [str(path) for path in files]}, indent=2))
        return 0
    return print_batch(run) if args.batch else print_rank(run, args.rank, args.follow)


def batch_logs(run: RunDir) -> list:
    return sorted((run.path / "sbatch").glob("*.log"), key=lambda path: path.stat().st_mtime)


def print_batch(run: RunDir) -> int:
    files = batch_logs(run)
    if not files:
        raise UserError(f"run {run.run_id} has no output of a job script yet")
    for path in files:
        print(f"--- {path} ---")
        sys.stdout.write(path.read_text(encoding="utf-8", errors="replace"))
    return 0


def write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def print_rank(run: RunDir, rank: int, follow: bool) -> int:
    if not follow and not rank_logs(run, rank):
        attempts = read_record(run).attempts
        why = "no attempt has started yet" if not attempts else f"no attempt had a rank {rank}"
        raise UserError(f"run {run.run_id} has no log of rank {rank}: {why}; `hpcmoe status {run.run_id}` tells more")
    tail = LogTail(run, rank, write_out)
    tail.pump()
    asked = 0.0
    while follow:
        if time.monotonic() - asked > ASK_EVERY_S or read_record(run).finished is not None:
            asked = time.monotonic()
            now = see(run)
            if now.final or now.state in ("STOPPED", "PLANNED"):
                tail.pump()
                print(f"--- run {run.run_id} is {now.state}" + (f": {now.reason}" if now.reason else "") + " ---")
                return 0
        time.sleep(FOLLOW_EVERY_S)
        tail.pump()
    return 0
