"""A local run whose processes are on another host of a shared file system: what its signs of life say, as nothing else can.

Its ranks write heartbeats into the attempt's directory (hpcmoe.engine.callbacks.watchdog). A run without them cannot be judged.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

from hpcmoe.runs.life import JobView, Life
from hpcmoe.runs.rundir import RunDir

# A rank writes one every 10 s at most. A file's time may be seen a minute late over NFS, and clocks differ.
FRESH_S = 120.0
GONE_S = 900.0  # a process that was starved or suspended for so long may still come back; then the claim is another's

LOOK_AGAIN_AFTER_S = 12.0  # longer than a rank lets pass between two signs of life


def job_elsewhere(run: RunDir, life: Life, host: str) -> JobView:
    """The job as it shows here. ``gone``: its signs of life ended long ago."""
    here, age = os.uname().nodename, last_beat_age(run, life)
    if age is None:
        problem = f"its processes are on {host}, and this is {here}: they give no signs of life that are seen from here"
        return JobView(reachable=False, problem=problem, host=host)
    if age <= FRESH_S:
        return JobView(state="RUNNING", reason=f"on {host}, last sign of life {age:.0f} s ago", host=host)
    problem = f"its processes are on {host}, and this is {here}: their last sign of life is {age / 60:.0f} minutes old"
    return JobView(reachable=False, problem=problem, host=host, gone=age > GONE_S)


def last_beat_age(run: RunDir, life: Life) -> float | None:
    """Seconds since a rank of the open attempt gave a sign of life; None where there is none."""
    newest: float | None = None
    for attempt in life.open:
        if attempt.rpartition(".")[0] != life.job_id:
            continue
        try:
            with os.scandir(run.heartbeats(attempt)) as beats:
                times = [beat.stat().st_mtime for beat in beats]
        except OSError:
            continue
        newest = max([*times, *([newest] if newest is not None else [])], default=None)
    return None if newest is None else max(0.0, time.time() - newest)


def still_beats(run: RunDir, attempts: Collection[str]) -> bool:
    """Whether a rank of these attempts gives a sign of life while this looks on. A file's content is fresh also over NFS."""
    before = _beats(run, attempts)
    if not before:
        return False
    time.sleep(LOOK_AGAIN_AFTER_S)
    return any(before.get(path) != beat for path, beat in _beats(run, attempts).items())


def _beats(run: RunDir, attempts: Collection[str]) -> dict[Path, str]:
    beats = {}
    for path in (path for attempt in attempts for path in run.heartbeats(attempt).glob("rank-*")):
        with contextlib.suppress(OSError):
            beats[path] = path.read_text(encoding="utf-8")
    return beats
