"""`hpcmoe cancel RUN`: end a run for good."""

from __future__ import annotations

import json
import time

from hpcmoe.cli.words import Parser, add_json, add_run
from hpcmoe.runs.control import cancel
from hpcmoe.runs.registry import find_run


def main(argv: list[str]) -> int:
    parser = Parser(prog="hpcmoe cancel", description="End a run for good; what it has saved stays.")
    add_run(parser)
    add_json(parser)
    args = parser.parse_args(argv)
    view = cancel(find_run(args.run))
    facts = view.as_json(time.time())
    if args.json:
        print(json.dumps({key: facts[key] for key in ("run_id", "job_id", "state", "reason", "step")}, indent=2))
    else:
        print(
            f"run {facts['run_id']} is {view.state}, at step {facts['step']}; `hpcmoe resume {facts['run_id']}` would continue it"
        )
    return 0
