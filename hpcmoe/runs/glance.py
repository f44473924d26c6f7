"""A thousand runs at a glance: of each the journal's turning points and the end of its metrics, for one line of a table.

Not for a run's story: hpcmoe.runs.store.read_record reads it all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcmoe.runs.gist import MOST_STALE, Gist, Key, gist_of, recall, remember
from hpcmoe.runs.journal import Event, events_among, parse_json_lines, split_lines
from hpcmoe.runs.observe import RunView
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import Record

# Events that a long run writes by the hundred. Each says "so far", so of a row of them, of one attempt, the last one says it all.
# The journal puts the time first, then the event, then the attempt. A torn line does not end in a brace, and so ends a row.
_LINE = rb'\n.{0,48}"event": "%s", "attempt": %s,.*\}$'
_ROW = re.compile(
    _LINE % (rb"(checkpoint_saved|step_skipped)", rb'("[^"]*")')
    + rb"(?:" + _LINE % (rb"\1", rb"\2") + rb")*"
    + rb"(" + _LINE % (rb"\1", rb"\2") + rb")",
    re.MULTILINE,
)  # fmt: skip


# What no line of a table asks for, but of the journal's last line the time: a third of what would have to be parsed.
_UNASKED = re.compile(
    rb'^\{"t": [0-9.]+, "event": "(?:resumed|left|next_samples|certified|interval_chosen)".*\}\n(?!\Z)', re.MULTILINE
)
_HOSTS, _STARTUP = re.compile(rb'"hosts": \[[^\]]*\], '), re.compile(rb', "startup": \{[^}]*\}')


def skim(data: bytes) -> list[Event]:
    """The events of a journal that a gist is made of, and of a row of checkpoints or of skipped steps only the last."""
    data = _UNASKED.sub(b"", _ROW.sub(rb"\3", data))
    return events_among(parse_json_lines(split_lines(_STARTUP.sub(b"", _HOSTS.sub(b"", data)))))


class Glancer:
    """Reads run directories again and again, and of a journal that has not changed since nothing but its length and times.

    What it gives is what a new one would give. A record's ``metrics``, ``attempts`` and ``events`` are read whole where they are
    asked for. ``root``: where runs lie of which much has been remembered by others (hpcmoe.runs.gist).
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._seen: dict[str, tuple[Key, Gist]] = {}
        self._recalled = root is None
        self._stale = 0  # journals read since the file beside the runs was read or written

    def read(self, run: RunDir) -> Record:
        """The run's record from a skimmed journal; an absent journal is an empty one."""
        try:
            file = os.open(run.journal, os.O_RDONLY)  # opening asks a network file system anew; a stat may be minutes old
        except FileNotFoundError:
            return Record(run, [])
        try:
            stat = os.fstat(file)
            key = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            known_key, gist = self._seen.get(str(run.path), (None, None))
            if gist is None or known_key != key:
                gist = gist_of(skim(_read(file, stat.st_size)))
                self._seen[str(run.path)] = (key, gist)
                self._stale += 1
        finally:
            os.close(file)
        return Record(run, None, given_gist=gist)

    def read_all(self, runs: Iterable[RunDir]) -> list[Record]:
        if not self._recalled:
            assert self._root is not None
            self._seen, self._recalled = {f"{self._root}/{run_id}": known for run_id, known in recall(self._root).items()}, True
        records = [self.read(run) for run in runs]
        if self._root is not None and self._stale > MOST_STALE:
            remember(self._root, {path.name: self._seen[str(path)] for path in self._still_there(records)})
            self._stale = 0
        return records

    def _still_there(self, records: Sequence[Record]) -> list[Path]:
        """The run directories in ``root`` of which something is known, those too that only others have looked at."""
        read = {str(record.run.path) for record in records}
        below = [Path(path) for path in self._seen if os.path.dirname(path) == str(self._root)]
        return [path for path in below if str(path) in read or path.is_dir()]


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
    attempts = list(record.gist.held)
    step = int(line.get("step") or 0) if record.steps_seen else None
    steps = record.planned.get("steps")
    seconds = line.get("seconds")
    runs = view.state == "RUNNING"
    return Glance(
        run_id=record.run.run_id,
        name=str(record.planned.get("name") or "-"),
        state=view.state,
        reason=view.reason or (record.gist.saving_fails if runs else None),
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
        gpu_hours=record.gist.gpu_hours(now),
        created=created_at(record),
        stepped=line.get("t"),
        left_s=(steps - (step or 0)) * seconds if runs and steps is not None and seconds is not None else None,
    )


def created_at(record: Record) -> float:
    """When the run was made; of a run with no readable journal, when its directory last changed."""
    first = record.gist.first
    return record.run.path.stat().st_mtime if first is None else first
