"""What a table of many runs needs of a run's journal, folded in one pass; and a file beside the runs that remembers it.

The file is a copy of what the journals say, each under its journal's size and time: it may be deleted, and what is out of date in
it, or not to be read, is read from the journal. Not for a run's story.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcmoe.files import write_atomic
from hpcmoe.runs.journal import Event
from hpcmoe.runs.life import Life, fold
from hpcmoe.runs.saves import saving_fails
from hpcmoe.runs.story import HOUR_S

FILE = ".glance.json"  # in the directory of the runs
MOST_STALE = 32  # journals read anew before the file is written again: to read so few costs less

Key = tuple[int, int, int]  # of a journal: inode, bytes, time of its last change in ns


@dataclass(frozen=True)
class Gist:
    """Times are epoch seconds."""

    life: Life
    planned: Event  # the run's first event; what it was meant to be
    first: float | None  # of the first line; None: an empty journal
    oldest: float
    newest: float
    sign: float  # the newest line but for notices that were sent
    held: dict[str, tuple[float, int, float | None]]  # by attempt, in the order of their starts: start, GPUs, end
    started: tuple[str, float] | None  # the newest start of an attempt
    saving_fails: str | None
    uid: int | None  # who submitted it last
    host: str | None  # of a local job: where its processes are
    start_ticks: int | None  # and when its script started, as the kernel there counts

    def gpu_hours(self, now: float) -> float:
        """What Attempt.gpu_hours adds up to over all attempts, up to ``now`` for one that nobody saw end."""
        gpu_s = sum(gpus * max(0.0, (now if end is None else end) - start) for start, gpus, end in self.held.values())
        return gpu_s / HOUR_S


def gist_of(events: Sequence[Event]) -> Gist:
    life = fold(events)
    planned: Event = {}
    held: dict[str, tuple[float, int, float | None]] = {}
    started: tuple[str, float] | None = None
    sign = 0.0
    uid = None
    for event in events:
        kind, t = event["event"], event["t"]
        if kind == "attempt_started":
            name = str(event["attempt"])
            held.setdefault(name, (float(t), int(event.get("gpus") or 0), None))
            started = (name, float(t))
        elif kind == "attempt_ended":
            if (begun := held.get(str(event["attempt"]))) is not None:
                held[str(event["attempt"])] = (*begun[:2], float(event.get("ended") or t))
        elif kind == "submitted":
            uid = event.get("uid", uid)
        elif kind == "planned":
            planned = planned or event
        if t > sign and kind != "notified":
            sign = float(t)
    times = [float(event["t"]) for event in events]
    return Gist(
        life=life,
        planned=planned,
        first=times[0] if times else None,
        oldest=min(times, default=0.0),
        newest=max(times, default=0.0),
        sign=sign,
        held=held,
        started=started,
        saving_fails=saving_fails(events),
        uid=uid,
        host=_of_local_job(life.job_id, "host", events),
        start_ticks=_of_local_job(life.job_id, "start_ticks", events),
    )


def _of_local_job(job_id: str | None, key: str, events: Sequence[Event]) -> Any:
    """What was said last of the job that carries the run, if it is one of this kind."""
    if job_id is None or not job_id.startswith("local-"):
        return None
    return next((event[key] for event in reversed(events) if event.get("job_id") == job_id and event.get(key)), None)


def _program() -> int:
    """Another program may understand a journal otherwise: what it remembers is not for this one."""
    here = Path(__file__)
    parts = [here.with_name(name).read_bytes() for name in (here.name, "life.py", "glance.py", "saves.py")]
    return zlib.crc32(b"".join(parts))


def recall(root: Path) -> dict[str, tuple[Key, Gist]]:
    """What the file in ``root`` remembers, by run id; nothing where there is none that can be read."""
    try:
        kept = json.loads((root / FILE).read_bytes())
        if kept["program"] != _program():
            return {}
        return {run_id: ((key[0], key[1], key[2]), _from_json(gist)) for run_id, (key, gist) in kept["runs"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def remember(root: Path, gists: Mapping[str, tuple[Key, Gist]]) -> None:
    """Write the file anew, whole. Where that is not to be had (another's directory, a full disk) nothing is remembered."""
    text = json.dumps({"program": _program(), "runs": {run_id: [key, _to_json(gist)] for run_id, (key, gist) in gists.items()}})
    try:
        write_atomic(root / FILE, text)
    except OSError:
        return


def _to_json(gist: Gist) -> dict[str, Any]:
    life = dict(vars(gist.life), jobs=sorted(gist.life.jobs), open=sorted(gist.life.open))
    return dict(vars(gist), life=life)


def _from_json(facts: dict[str, Any]) -> Gist:
    life = facts["life"]
    life.update(jobs=frozenset(life["jobs"]), attempts=tuple(life["attempts"]), open=frozenset(life["open"]))
    held = {name: (start, gpus, end) for name, (start, gpus, end) in facts["held"].items()}
    started = facts["started"] and (facts["started"][0], facts["started"][1])
    return Gist(**{**facts, "life": Life(**life), "held": held, "started": started})
