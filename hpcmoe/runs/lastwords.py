"""What a failed attempt said last: the reason in one line, and the end of the failing rank's log. Reads files only."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hpcmoe.files import read_json, tail_lines
from hpcmoe.runs.ending import Cause
from hpcmoe.runs.rundir import RunDir

LAST_LINES = 12


def detail_of(run: RunDir, attempt: str, cause: Cause, rc: int | None) -> str | None:
    """For an ending that nobody asked for: the watchdog's or the first rank's last words, or at least the exit code."""
    if cause is Cause.HANG:
        return str((read_json(run.hang(attempt)) or {}).get("reason"))
    if cause not in (Cause.CRASHED, Cause.OUT_OF_MEMORY):
        return None
    for path in _errors(run, attempt):
        lines = tail_lines(path, 1)
        if lines:
            return f"{path.stem.removeprefix('error-')}: {lines[-1].strip()}"
    if rc is None:
        return None
    return f"the ranks left with exit code {rc}" + (f" (signal {rc - 128})" if rc > 128 else "")


def last_lines(run: RunDir, attempt: str) -> list[str]:
    """The end of the log of the rank that failed; of rank 0 where no rank said that it did. Headed by the log's name."""
    numbers = [int(match[1]) for path in _errors(run, attempt) if (match := re.fullmatch(r"error-rank(\d+)", path.stem))]
    log = run.rank_log(attempt, numbers[0] if numbers else 0)
    lines = tail_lines(log, LAST_LINES)
    return [f"{log.relative_to(run.path)}:", *lines] if lines else []


def last_step_done(run: RunDir, attempt: str) -> int | None:
    """The newest step that the ranks' signs of life show as done: at least so far the attempt got. None: there is no such sign.

    They are rewritten in place, which a full disk allows, where metrics.jsonl cannot grow; they may be ten seconds old.
    """
    done = []
    for path in run.heartbeats(attempt).glob("rank-*"):
        with contextlib.suppress(OSError, ValueError):
            step, phase, _ = path.read_text().split()
            done.append(int(step) if phase == "save" else int(step) - 1)  # what is entered is not done
    return max((step for step in done if step > 0), default=None)


def _errors(run: RunDir, attempt: str) -> list[Path]:
    """What ranks wrote down of their own failures, the first failure first: the others often only lost their peer."""
    try:
        return sorted(run.attempt(attempt).glob("error-rank*.txt"), key=lambda path: (path.stat().st_mtime, path.name))
    except OSError:
        return []
