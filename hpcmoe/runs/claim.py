"""The claim: which job may write to a run. One at a time, whatever Slurm starts; the others leave at once and say why.

A free claim is taken by an exclusive create, a dead job's by a line in the journal, of which the first counts.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from hpcmoe.files import read_json, write_json
from hpcmoe.runs.elsewhere import job_elsewhere
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.life import WAITING_STATES, fold
from hpcmoe.runs.place import Place, local_pid, process_start_ticks
from hpcmoe.runs.rundir import RunDir
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.states import UNKNOWN, is_alive

# A previous job that is still COMPLETING may have ranks that write; it is given this long to go.
CLAIM_WAIT_S = 60.0
LEAVING_STATES = frozenset({"COMPLETING", "SIGNALING", "STAGE_OUT", UNKNOWN})


def take_claim(run: RunDir, place: Place) -> bool:
    """Become the one attempt that may write to this run. False: another one is alive and holds it."""
    deadline = time.monotonic() + CLAIM_WAIT_S
    while True:
        held = holder(run)
        if held is None or held.get("job_id") == place.job_id:
            break
        state = _holder_state(run, held)
        if state is None:
            break
        if state not in LEAVING_STATES or time.monotonic() > deadline:
            Journal(run.journal).append("ghost", job_id=place.job_id, holder=held["job_id"])
            print(f"hpcmoe: run {run.run_id} is being trained by job {held['job_id']}; job {place.job_id} leaves", flush=True)
            return False
        time.sleep(2.0)
    return _write_claim(run, place, held)


def holder(run: RunDir) -> dict | None:
    """Who holds the claim: the one that is written down, or whoever has taken it over since and could not write that."""
    held = read_json(run.claim)
    while held is not None and (taker := _taker(run, held)) is not None:
        held = taker
    return held


def _taker(run: RunDir, held: dict) -> dict | None:
    """The first job that journalled that it takes over from ``held``."""
    taken = (event for event in read_journal(run.journal) if event["event"] == "claim_taken")
    return next((event["claim"] for event in taken if event["after"] == _name(held)), None)


def _name(claim: dict) -> str:
    """A claim's own name: attempts of local jobs are named after process ids, which come again."""
    return f"{claim.get('attempt')}@{claim.get('ticks')}"


def _write_claim(run: RunDir, place: Place, held: dict | None) -> bool:
    """Take the claim so that of several jobs that start at once only one goes on.

    A free one by an exclusive create; one of a dead job by a line in the journal, of which the first counts.
    """
    ticks = process_start_ticks(os.getppid())
    claim = {"job_id": place.job_id, "attempt": place.attempt, "pid": os.getppid(), "ticks": ticks, "host": os.uname().nodename}
    if held == claim:
        return True
    if held is not None:
        Journal(run.journal).append("claim_taken", claim=claim, after=_name(held))
        won = _taker(run, held) == claim
        if won:
            write_json(run.claim, claim)
    else:
        won = _create(run.claim, claim, f"{place.attempt}.{os.getpid()}")
    if not won:
        Journal(run.journal).append("ghost", job_id=place.job_id, holder=(holder(run) or claim)["job_id"])
        print(f"hpcmoe: another job took run {run.run_id} in this moment; job {place.job_id} leaves", flush=True)
    return won


def _create(path: Path, claim: dict, mark: str) -> bool:
    """Write a file that does not exist yet, whole; False when it does."""
    fresh = path.with_name(f".{path.name}.{mark}")
    write_json(fresh, claim)
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        fresh.unlink(missing_ok=True)
    return True


def holds_claim(run: RunDir, place: Place) -> bool:
    held = read_json(run.claim)
    return isinstance(held, dict) and held.get("attempt") == place.attempt


def _holder_state(run: RunDir, held: dict) -> str | None:
    """Slurm's state of the job that holds the claim, UNKNOWN where it cannot be asked; None: that job trains no more."""
    job_id = str(held.get("job_id"))
    if job_id.startswith("local-") and held.get("host", os.uname().nodename) != os.uname().nodename:
        return _elsewhere(run, held)
    if job_id.startswith("local-"):
        ticks = process_start_ticks(local_pid(job_id))
        return "RUNNING" if ticks is not None and ticks == held.get("ticks", ticks) else None
    try:
        row = client.squeue([job_id]).get(job_id)
    except SlurmError:
        return UNKNOWN  # blind: assume the worst, which costs a wait and never a run trained twice
    return row.state if row is not None and is_alive(row.state) and row.state not in WAITING_STATES else None


def _elsewhere(run: RunDir, held: dict) -> str | None:
    """Of a local job on another host: as was found when the run was resumed; else as its signs of life say."""
    events, attempt = read_journal(run.journal), held.get("attempt")
    if any(event["event"] == "taken_over" and attempt in event["attempts"] for event in events):
        return None
    told = [e["event"] for e in events if e["event"] in ("attempt_started", "attempt_ended") and e.get("attempt") == attempt]
    if told[-1:] == ["attempt_ended"]:
        return None  # by whoever closed it, on its host, after it had died without a word
    life = replace(fold(events), job_id=str(held["job_id"]))
    return None if job_elsewhere(run, life, str(held["host"])).gone else "RUNNING"


def release_claim(run: RunDir, place: Place) -> None:
    if holds_claim(run, place):
        run.claim.unlink(missing_ok=True)
