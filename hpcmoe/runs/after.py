"""What a run's end means for its sweep, asked by the job script that ends. Light, as every attempt pays for its import."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcmoe.errors import UserError
from hpcmoe.runs.journal import first_json_line
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.sweep import SweepDir
from hpcmoe.runs.sweep_life import anything_to_do


def sweep_of(run: RunDir) -> SweepDir | None:
    """The sweep whose point the run is; None: of none, or of one that is gone."""
    path = (first_json_line(run.journal) or {}).get("sweep")
    found = SweepDir(Path(path)) if path else None
    return found if found is not None and found.facts_file.exists() else None


def advance_after(run: RunDir, leaving: str) -> None:
    """The run has ended for good in the job ``leaving``, which is still there: go on with its sweep. That never fails the run."""
    try:
        sweep = sweep_of(run)
        if sweep is None or not anything_to_do(sweep):
            return
        from hpcmoe.runs.advance import advance

        for line in advance(sweep, leaving=leaving):
            print(f"hpcmoe: {line}", flush=True)
    except (UserError, OSError, LookupError, TypeError, ValueError) as error:
        print(f"hpcmoe: the sweep is left for a supervisor: {error}", file=sys.stderr)
