"""Runs that have the result of a configuration already. Reads one line of each run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hpcmoe.runs.journal import first_json_line
from hpcmoe.runs.registry import run_dirs
from hpcmoe.runs.store import result_state


def finished_runs(root: Path, keys: Collection[str]) -> dict[str, str]:
    """By key (hpcmoe.config.key): the id of the newest run below ``root`` that has COMPLETED with it."""
    found: dict[str, tuple[float, str]] = {}
    for run in run_dirs(root):
        planned = first_json_line(run.journal) or {}
        key = str(planned.get("key"))
        if key in keys and result_state(run) == "COMPLETED":
            found[key] = max(found.get(key, (0.0, "")), (float(planned.get("t") or 0.0), run.run_id))
    return {key: run_id for key, (_, run_id) in found.items()}
