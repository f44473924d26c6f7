"""A run's state = f(journal, Slurm). Asks Slurm once for any number of runs; decides with pure functions; changes nothing.

A blind observer says so: where Slurm cannot be asked, or has forgotten the job, the state is UNKNOWN with the last known one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcmoe.runs.elsewhere import job_elsewhere
from hpcmoe.runs.life import JobView, standing
from hpcmoe.runs.place import local_pid, process_start_ticks
from hpcmoe.runs.store import Record
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.states import is_alive

FINAL_STATES = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
CLOCK_SKEW_S = 120.0  # between this host and Slurm's


@dataclass(frozen=True)
class RunView:
    """A run's state now, with the reason in words."""

    record: Record
    state: str  # PLANNED | QUEUED | RUNNING | STOPPED | COMPLETED | FAILED | CANCELLED | UNKNOWN
    reason: str | None
    job: JobView
    last_known: str | None = None  # with UNKNOWN
    unknown_since: float | None = None
    resumable: bool = False  # `hpcmoe resume`, or a supervisor, can bring it back
    involuntary: bool = False  # it stopped although nobody wanted that: a supervisor should bring it back

    @property
    def final(self) -> bool:
        return self.state in FINAL_STATES

    def as_json(self, now: float) -> dict[str, Any]:
        record = self.record
        return {
            "run_id": record.run.run_id,
            "name": record.planned.get("name"),
            "state": self.state,
            "reason": self.reason,
            "last_known": self.last_known,
            "unknown_since": self.unknown_since,
            "job_id": record.job_id,
            "run_dir": str(record.run.path),
            "step": (record.last_line or {}).get("step", 0 if record.steps_seen else None),
            "steps": record.planned.get("steps"),
            "attempts": [attempt.as_json(now) for attempt in record.attempts],
            "gpu_hours": sum(attempt.gpu_hours(now) for attempt in record.attempts),
        }


def view(record: Record, job: JobView, now: float) -> RunView:
    """The state of one run from plain values."""
    life = record.life
    found = standing(life, job, now)
    seen = RunView(record, found.state, found.reason, job, resumable=found.resumable, involuntary=found.involuntary)
    if found.state != "UNKNOWN":
        return seen
    since = max(record.gist.newest, (record.last_line or {}).get("t", 0.0)) or now
    return replace(seen, last_known="RUNNING" if life.open else "QUEUED", unknown_since=since)


@dataclass(frozen=True)
class Answers:
    """What was said of the runs' jobs, by job id."""

    jobs: dict[str, JobView]
    gone: frozenset[str] = frozenset()  # not in squeue: accounting was asked, or what it had said before was used


def ask(records: Sequence[Record], known: Mapping[str, JobView] | None = None) -> Answers:
    """What Slurm (or the process table) says of the jobs of many runs, with one squeue and at most one sacct.

    ``known``: what accounting said lately of jobs that squeue no longer listed; of these it is not asked again.
    """
    open_records = [record for record in records if record.finished is None and record.job_id is not None]
    local = {str(record.job_id): _local_job(record) for record in open_records if _is_local(record)}
    return _ask_slurm({str(record.job_id): record for record in open_records if not _is_local(record)}, known or {}, local)


def views(records: Sequence[Record], answers: Answers, now: float) -> list[RunView]:
    return [view(record, answers.jobs.get(str(record.job_id), JobView()), now) for record in records]


def observe(records: Sequence[Record], now: float | None = None) -> list[RunView]:
    """The states of many runs, with one squeue and at most one sacct."""
    return views(records, ask(records), time.time() if now is None else now)


def _is_local(record: Record) -> bool:
    return str(record.job_id).startswith("local-")


def _local_job(record: Record) -> JobView:
    """Alive when the process with the recorded pid is the one that was started then."""
    job_id = str(record.job_id)
    ticks = process_start_ticks(local_pid(job_id))
    known, host = record.gist.start_ticks, record.gist.host
    if host is not None and host != os.uname().nodename:
        return job_elsewhere(record.run, record.life, host)
    if ticks is not None and known in (None, ticks):
        return JobView(state="RUNNING")
    return JobView(state="FAILED", reason="its processes are gone")


def _ask_slurm(ids: dict[str, Record], known: Mapping[str, JobView], local: dict[str, JobView]) -> Answers:
    if not ids:
        return Answers(local)
    try:
        rows = client.squeue(list(ids), *_users(ids.values()))
    except SlurmError as error:
        return Answers(local | {job_id: JobView(reachable=False, problem=str(error)) for job_id in ids})
    found = {
        job_id: JobView(row.state, row.reason, row.start)
        for job_id, row in rows.items()
        if job_id in ids and _is_ours(row.submit, ids[job_id])
    }
    gone = {job_id: record for job_id, record in ids.items() if job_id not in found}
    told = {job_id: known[job_id] for job_id in gone if job_id in known}
    told |= _from_accounting({job_id: record for job_id, record in gone.items() if job_id not in told})
    return Answers(local | found | told, frozenset(gone))


def _users(records: Collection[Record]) -> set[str]:
    """The uids whose jobs these are, for a question about so many jobs that it cannot name them."""
    if len(records) <= client.MOST_IDS:
        return set()
    return {str(_uid(record)) for record in records}


def _uid(record: Record) -> int:
    """Who submitted the run last: a colleague may have resumed it."""
    uid = record.gist.uid
    return record.run.path.stat().st_uid if uid is None else int(uid)


def _is_ours(submit: float | None, record: Record) -> bool:
    """Slurm counts its ids anew after a reset, and other clusters count too: a job older than the run is another's."""
    return submit is None or submit >= (record.gist.first or 0.0) - CLOCK_SKEW_S


def _from_accounting(missing: dict[str, Record]) -> dict[str, JobView]:
    """Jobs that squeue no longer lists. Accounting is believed only about ends: its live states are stale by then."""
    if not missing:
        return {}
    since = min(record.gist.oldest for record in missing.values()) - 3600.0
    try:
        rows = client.sacct(list(missing), since=since)
    except SlurmError as error:
        return {job_id: JobView(state=None, problem=str(error)) for job_id in missing}
    newest = {row.job_id: row for row in rows if row.job_id in missing and _is_ours(row.submit, missing[row.job_id])}
    return {
        job_id: JobView(newest[job_id].state) if job_id in newest and not is_alive(newest[job_id].state) else JobView()
        for job_id in missing
    }
