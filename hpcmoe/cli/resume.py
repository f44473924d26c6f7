"""`hpcmoe resume RUN`: continue a run that is stopped, cancelled, failed or lost, from its newest checkpoint."""

from __future__ import annotations

import json

from hpcmoe.cli.wait import follow
from hpcmoe.cli.words import Parser, add_json, add_run, positive
from hpcmoe.runs.control import resume
from hpcmoe.runs.registry import find_run


def main(argv: list[str]) -> int:
    parser = Parser(prog="hpcmoe resume", description="Continue a run from its newest checkpoint.")
    add_run(parser)
    parser.add_argument(
        "--max-gpu-hours", type=positive, metavar="N", help="a new resilience.max_gpu_hours, counted over all attempts of the run"
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="of a local run: its processes on another host are gone, although none can see that",
    )
    parser.add_argument("--wait", action="store_true", help="follow it, and exit with its result")
    add_json(parser)
    args = parser.parse_args(argv)
    run = find_run(args.run)
    job_id = resume(run, args.max_gpu_hours, args.take_over)
    if args.wait:
        return follow(run, as_json=args.json)
    if args.json:
        print(json.dumps({"run_id": run.run_id, "job_id": job_id, "run_dir": str(run.path)}, indent=2))
    else:
        print(f"run {run.run_id} is submitted again as job {job_id}; `hpcmoe logs {run.run_id} -f` follows it")
    return 0
