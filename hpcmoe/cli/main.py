"""`hpcmoe VERB ...`: finds the verb, runs it, turns a user's mistake into one line. Each verb is one file beside this one.

Stays light: nothing is imported here that --help or status would not need.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from hpcmoe import __version__
from hpcmoe.errors import UserError, nearest
from hpcmoe.process import collect_little

VERBS = {
    "doctor": "what this site's Slurm will do to a run, and what to change",
    "plan": "which layout fits, why, and how fast it would be",
    "submit": "start a run (or, with -m, a sweep of runs)",
    "status": "all runs, or the story of one",
    "watch": "all runs, live",
    "logs": "what a rank of a run wrote",
    "cancel": "end a run for good",
    "resume": "bring back a run that stopped, was cancelled or failed",
    "sweep": "status, results, cancel, resume, ... of all runs of a sweep",
    "supervise": "look after all runs: bring back what nobody is left to bring back",
    "wait": "follow a run until it is over, and exit with its result",
}


def verbs() -> dict[str, str]:
    """The verbs of this installation with one line each."""
    return {verb: text for verb, text in VERBS.items() if find_spec(f"hpcmoe.cli.{verb}")}


def usage() -> str:
    lines = [f"  {verb:<9} {text}" for verb, text in verbs().items()]
    return "\n".join(
        [
            "hpcmoe: train Mixture-of-Experts language models on Slurm clusters, or right here",
            "",
            "usage: hpcmoe VERB [--json] ...      hpcmoe VERB --help      hpcmoe --version",
            "",
            *lines,
            "",
            "start:  hpcmoe submit model=tiny cluster=local        then  hpcmoe logs latest -f",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of ``hpcmoe argv``: 0 done, 2 the user's mistake, 130 interrupted, otherwise the verb's own."""
    if argv is None:
        collect_little()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except UserError as error:
        return _report(error, as_json="--json" in arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; what Python still holds for it goes nowhere, silently.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"hpcmoe {__version__}")
        return 0
    verb = arguments[0]
    if verb not in verbs():
        hint = nearest(verb, verbs())
        near = f"did you mean {hint!r}? " if hint else ""
        raise UserError(f"no verb {verb!r}; {near}verbs: {', '.join(verbs())}")
    status = importlib.import_module(f"hpcmoe.cli.{verb}").main(arguments[1:])
    assert isinstance(status, int), f"{verb} returned {status!r}"
    return status


def _report(error: UserError, as_json: bool) -> int:
    line = " ".join(str(error).split())
    print(f"hpcmoe: {line}", file=sys.stderr)
    if as_json:
        import json

        print(json.dumps({"error": line}))
    return 2


if __name__ == "__main__":
    sys.exit(main())
