"""``rungs.jsonl`` of a sweep: which runs have reached which rung, and with what. Written by rank 0 of each, read by all.

What follows from it is decided in hpcmoe.runs.halving. Knows no Slurm and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpcmoe.locks import file_lock
from hpcmoe.runs.halving import Reached
from hpcmoe.runs.journal import Event, Journal, iter_json_lines

NAME = "rungs.jsonl"
LOCK_WAIT_S = 20.0  # for the lines of others, whose disk may be slow; then a line is added without the lock


def read_rungs(sweep_dir: Path) -> list[Reached]:
    """All whole lines, oldest first. An absent file is an empty one."""
    return [one for line in iter_json_lines(sweep_dir / NAME) if (one := _reached(line)) is not None]


def write_rung(sweep_dir: Path, one: Reached, attempt: str) -> list[Reached]:
    """Add a line, durably, unless there is one of this run at this rung; returns all lines, with it.

    Raises OSError where it cannot be written. The lock is for file systems on which lines that are added at the same time on two
    hosts get lost (NFS); a single write is what keeps them apart elsewhere.
    """
    with file_lock(sweep_dir / f".{NAME}.lock", LOCK_WAIT_S):
        known = read_rungs(sweep_dir)
        if any(other.run_id == one.run_id and other.rung == one.rung for other in known):
            return known
        fields = {"run_id": one.run_id, "rung": one.rung, "step": one.step, "value": one.value}
        Journal(sweep_dir / NAME, attempt).append("reached", **fields)
        return [*known, one]


def with_told(reached: Iterable[Reached], told: Iterable[Reached]) -> list[Reached]:
    """``reached``, and what runs' own journals know beside it: a line may have been lost."""
    found = list(reached)
    known = {(one.run_id, one.rung) for one in found}
    return found + [one for one in told if (one.run_id, one.rung) not in known]


def told_by(run_id: str, events: Iterable[Event]) -> list[Reached]:
    """The rungs that a run's own journal knows of."""
    lines = ({**event, "run_id": run_id} for event in events if event["event"] == "rung")
    return [one for line in lines if (one := _reached(line)) is not None]


def passed_rungs(events: Iterable[Event]) -> frozenset[int]:
    """The rungs at which a run has been told to go on, by its journal: there, or by being submitted again after it had paused."""
    passed: set[int] = set()
    paused: int | None = None
    for event in events:
        match event["event"]:
            case "rung" if event.get("goes_on"):
                passed.add(int(event["rung"]))
            case "rested":
                paused = event.get("rung")
            case "submitted" | "attempt_started" if paused is not None:
                passed.add(paused)
                paused = None
    return frozenset(passed)


def paused_at(events: Iterable[Event], attempt: str) -> int | None:
    """The rung at which this attempt was told to pause."""
    told = [event for event in events if event["event"] == "rung" and event["attempt"] == attempt]
    return int(told[-1]["rung"]) if told and not told[-1].get("goes_on") else None


def sweep_dir_of(events: Sequence[Event]) -> Path | None:
    """The directory of the sweep that a run belongs to, by its journal; None: it belongs to none."""
    found = next((event.get("sweep") for event in events if event["event"] == "planned"), None)
    return None if found is None else Path(found)


def _reached(line: Event) -> Reached | None:
    value = line.get("value")
    if not isinstance(line.get("run_id"), str) or not isinstance(line.get("rung"), int) or isinstance(value, (str, list, dict)):
        return None
    number = None if value is None or not math.isfinite(value) else float(value)
    return Reached(str(line["run_id"]), int(line["rung"]), int(line.get("step") or 0), number)
