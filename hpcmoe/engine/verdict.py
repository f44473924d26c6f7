"""What a rank tells the batch shell at its end: a verdict once all is durable, or the reason why there is none. Stdlib only."""

from __future__ import annotations

import os
import traceback
from typing import Literal

from hpcmoe.files import write_atomic, write_json
from hpcmoe.runs.rundir import RunDir

Word = Literal["completed", "leave", "stopped", "failed"]
# time_limit: the ranks saw the job's end coming themselves; rung: the sweep's early stopping pauses the run
Source = Literal["signal", "control", "time_limit", "rung"]


def write_verdict(
    run: RunDir, attempt: str, verdict: Word, step: int, source: Source | None = None, reason: str | None = None
) -> None:
    """``step``: the last one that is in a durable checkpoint."""
    write_json(run.verdict(attempt), {"verdict": verdict, "step": step, "source": source, "reason": reason})


def write_error(run: RunDir, attempt: str, rank: int, error: BaseException) -> None:
    """Leave the traceback where ``depart`` finds it."""
    write_error_text(run, attempt, rank, "".join(traceback.format_exception(error)))


def write_error_text(run: RunDir, attempt: str, rank: int, text: str) -> None:
    """Its last line is the reason in short. An error while writing must not hide the first one."""
    try:
        write_atomic(run.attempt(attempt) / f"error-rank{rank:04d}.txt", text)
    except OSError as second:
        os.write(2, f"could not write the error file: {second}\n".encode())
