"""A thousand runs at a glance: of each the journal's turning points and the end of its metrics, for one line of a table.

Nothing is kept on disk, so nothing there can be out of date. Not for a run's story: hpcmoe.runs.store.read_record reads it all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcmoe.runs.journal import Event, events_among, parse_json_lines, split_lines
from hpcmoe.runs.observe import RunView
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.saves import saving_fails
from hpcmoe.runs.store import Record
from hpcmoe.runs.story import HOUR_S

# Events that a long run writes by the hundred. Each says "so far", so of a row of them, of one attempt, the last one says it all.
# The journal puts the time first, then the event, then the attempt. A torn line does not end in a brace, and so ends a row.
_LINE = rb'\n.{0,48}"event": "%s", "attempt": %s,.*\}$'
_ROW = re.compile(
    _LINE % (rb"(checkpoint_saved|step_skipped)", rb'("[^"]*")')
    + rb"(?:" + _LINE % (rb"\1", rb"\2") + rb")*"
    + rb"(" + _LINE % (rb"\1", rb"\2") + rb")",
    re.MULTILINE,
)  # fmt: skip


def skim(data: bytes) -> list[Event]:
    """The events of a journal, but of a row of checkpoints or of skipped steps only the last."""
    return events_among(parse_json_lines(split_lines(_ROW.sub(rb"\3", data))))


class Glancer:
    """Reads run directories again and again, and of a journal that has not changed since nothing but its length and times.

    What it gives is what a new one would give. A record's ``metrics`` and ``attempts`` are read whole where they are asked for.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int, int], Record]] = {}

    def read(self, run: RunDir) -> Record:
        """The run's record from a skimmed journal; an absent journal is an empty one."""
        try:
            file = os.open(run.journal, os.O_RDONLY)  # opening asks a network file system anew; a stat may be minutes old
        except FileNotFoundError:
            return Record(run, [])
        try:
            stat = os.fstat(file)
            key = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            known_key, known = self._seen.get(run.path, (None, None))
            if known is None or known_key != key:
                record = Record(run, skim(_read(file, stat.st_size)))
            else:
                record = Record(run, known.events)  # new, as the metrics may have changed
                record.__dict__["life"] = known.life
            self._seen[run.path] = (key, record)
        finally:
            os.close(file)
        return record

    def read_all(self, runs: Iterable[RunDir]) -> list[Record]:
        return [self.read(run) for run in runs]


def _read(file: int, size: int) -> bytes:
    """Exactly the first ``size`` bytes, those that the key is of; fewer if the file was cut meanwhile."""
    pieces, at = [], 0
    while at < size and (piece := os.pread(file, size - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


@dataclass(frozen=True)
class Glance:
    """One run as a line of a table. Times are epoch seconds; None: not known, or not so yet."""

    run_id: str
    name: str
    state: str
    reason: str | None
    last_known: str | None  # with UNKNOWN
    unknown_since: float | None
    run_dir: str
    job_id: str | None
    step: int | None  # of a command whose steps nobody sees: None
    steps: int | None
    loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    attempt_count: int
    attempt: str | None  # the newest
    gpu_hours: float
    created: float
    stepped: float | None  # the newest step's end
    left_s: float | None  # at the pace of the newest step, for a run that runs


def glance(view: RunView, now: float) -> Glance:
    """From the journal and the last line of the metrics alone."""
    record = view.record
    line = record.last_line or {}
    attempts, gpu_hours = _held(record.events, now)
    step = int(line.get("step") or 0) if record.steps_seen else None
    steps = record.planned.get("steps")
    seconds = line.get("seconds")
    runs = view.state == "RUNNING"
    return Glance(
        run_id=record.run.run_id,
        name=str(record.planned.get("name") or "-"),
        state=view.state,
        reason=view.reason or (saving_fails(record.events) if runs else None),
        last_known=view.last_known,
        unknown_since=view.unknown_since,
        run_dir=str(record.run.path),
        job_id=record.job_id,
        step=step,
        steps=steps,
        loss=line.get("loss"),
        tokens_per_s=line.get("tokens_per_s"),
        mfu=line.get("mfu"),
        attempt_count=len(attempts),
        attempt=attempts[-1] if attempts else None,
        gpu_hours=gpu_hours,
        created=created_at(record),
        stepped=line.get("t"),
        left_s=(steps - (step or 0)) * seconds if runs and steps is not None and seconds is not None else None,
    )


def created_at(record: Record) -> float:
    """When the run was made; of a run with no readable journal, when its directory last changed."""
    return float(record.events[0]["t"]) if record.events else record.run.path.stat().st_mtime


def _held(events: list[Event], now: float) -> tuple[list[str], float]:
    """The attempts in the order of their starts, and GPU-hours over all of them, up to ``now`` for one that nobody saw end.

    What Attempt.gpu_hours adds up to, in a tenth of the time.
    """
    started: dict[str, tuple[float, int]] = {}
    ended: dict[str, float] = {}
    for event in events:
        kind = event["event"]
        if kind == "attempt_started":
            started.setdefault(str(event["attempt"]), (float(event["t"]), int(event.get("gpus") or 0)))
        elif kind == "attempt_ended" and event["attempt"] in started:
            ended[str(event["attempt"])] = float(event.get("ended") or event["t"])
    gpu_s = sum(gpus * max(0.0, ended.get(name, now) - since) for name, (since, gpus) in started.items())
    return list(started), gpu_s / HOUR_S
