"""``python -m hpcmoe.runs.arrive RUN_DIR``: the first thing a job script does, before any rank starts.

Holds the claim (one attempt at a time), closes attempts that ended without a word, and journals this one.
Exit code 0: go on; 3: there is nothing to do here; 2: error, with one line on stderr. Not for what ranks do.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hpcmoe.errors import UserError
from hpcmoe.files import read_json, write_json
from hpcmoe.process import collect_little
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.lifecycle import cause_of_record, give_up_reason
from hpcmoe.runs.place import Place, local_pid, process_start_ticks, this_place
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.settle import settle
from hpcmoe.runs.store import Record, finish, raw_config, read_record, result_state
from hpcmoe.runs.story import Attempt, last_sign_of_life
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.parse import expand_hostlist
from hpcmoe.slurm.states import is_alive

GO_ON, ERROR, NOTHING_TO_DO = 0, 2, 3
# A previous job that is still COMPLETING may have ranks that write; it is given this long to go.
CLAIM_WAIT_S = 60.0


def arrive(run: RunDir, place: Place) -> int:
    """Start an attempt. Returns one of GO_ON and NOTHING_TO_DO; raises UserError when the run directory is not usable."""
    state = result_state(run)
    if state is not None:
        print(f"hpcmoe: run {run.run_id} is {state} already; this job has nothing to do", flush=True)
        return NOTHING_TO_DO
    if not take_claim(run, place):
        return NOTHING_TO_DO
    close_silent_attempts(run, place)
    record = read_record(run)
    config = raw_config(run)
    give_up = give_up_reason(record.attempts_since_resume, int(config["resilience"]["max_attempts_without_progress"]))
    if give_up is not None:
        return _give_up(run, place, give_up)
    if config.get("min_nodes"):
        try:
            settle(run, place.attempt, place.nodes)
        except UserError as error:
            return _give_up(run, place, f"the {place.nodes} nodes of job {place.job_id} cannot be used: {error}")
    run.attempt(place.attempt).mkdir(parents=True, exist_ok=True)
    previous_end = max((a.ended for a in record.attempts if a.ended is not None), default=None)
    journal_start(run, place, config, previous_end)
    return GO_ON


def _give_up(run: RunDir, place: Place, reason: str) -> int:
    finish(run, "FAILED", reason, place.attempt)
    release_claim(run, place)
    print(f"hpcmoe: run {run.run_id} gives up: {reason}", flush=True)
    return NOTHING_TO_DO


def journal_start(run: RunDir, place: Place, config: dict, previous_end: float | None) -> None:
    counts_gpus = config["cluster"]["device"] == "cuda" or config["cluster"]["gres"]
    Journal(run.journal, place.attempt).append(
        "attempt_started",
        job_id=place.job_id,
        restart=place.restart,
        nodes=place.nodes,
        hosts=expand_hostlist(place.nodelist) if place.scheduler == "slurm" else [place.nodelist],
        gpus=place.nodes * int(config["gpus_per_node"]) if counts_gpus else 0,
        away_s=None if previous_end is None else round(time.time() - previous_end, 3),  # since the previous attempt's end
        pid=os.getppid(),
        start_ticks=process_start_ticks(os.getppid()),
    )


def take_claim(run: RunDir, place: Place) -> bool:
    """Become the one attempt that may write to this run. False: another one is alive and holds it."""
    deadline = time.monotonic() + CLAIM_WAIT_S
    while True:
        held = read_json(run.claim)
        if held is None or held.get("job_id") == place.job_id:
            break
        if not _holder_alive(held):
            break
        if time.monotonic() > deadline:
            print(f"hpcmoe: run {run.run_id} is being trained by job {held['job_id']}; job {place.job_id} leaves", flush=True)
            return False
        time.sleep(2.0)
    return _write_claim(run, place, held)


def _write_claim(run: RunDir, place: Place, held: dict | None) -> bool:
    """Take the claim by an exclusive create, so that of two jobs that start at once only one goes on."""
    claim = {"job_id": place.job_id, "attempt": place.attempt, "pid": os.getppid(), "ticks": process_start_ticks(os.getppid())}
    if held is not None:
        run.claim.unlink(missing_ok=True)
    fresh = run.path / f".claim.{place.attempt}.{os.getpid()}"
    write_json(fresh, claim)
    try:
        os.link(fresh, run.claim)
    except FileExistsError:
        print(f"hpcmoe: another job took run {run.run_id} in this moment; job {place.job_id} leaves", flush=True)
        return False
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _holder_alive(held: dict) -> bool:
    job_id = str(held.get("job_id"))
    if job_id.startswith("local-"):
        ticks = process_start_ticks(local_pid(job_id))
        return ticks is not None and ticks == held.get("ticks", ticks)
    try:
        row = client.squeue([job_id]).get(job_id)
    except SlurmError:
        return True  # blind: assume the worst, which costs a wait and never a run trained twice
    return row is not None and is_alive(row.state) and row.state not in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


def release_claim(run: RunDir, place: Place) -> None:
    held = read_json(run.claim)
    if isinstance(held, dict) and held.get("attempt") == place.attempt:
        run.claim.unlink(missing_ok=True)


def close_silent_attempts(run: RunDir, place: Place | None) -> None:
    """Journal the end of every attempt that died without a word, with Slurm's cause where Slurm still knows it."""
    record = read_record(run)
    for attempt in record.attempts:
        if attempt.open and (place is None or attempt.attempt != place.attempt):
            close_attempt(run, record, attempt)


def close_attempt(run: RunDir, record: Record, attempt: Attempt) -> None:
    row = _accounting_record(attempt)
    signs = [row.end if row else None, last_sign_of_life(attempt.attempt, record.events, record.metrics)]
    ended = next((moment for moment in signs if moment is not None), None)
    cause = cause_of_record(row.state if row else None, record.cancel_requested)
    Journal(run.journal, attempt.attempt).append(
        "attempt_ended",
        cause=cause.value,
        **work_done(record, attempt.attempt),
        detail=f"ended without a word; Slurm's accounting says {row.state}" if row else "ended without a word",
        ended=ended,
        end_estimated=row is None or row.end is None,
        rc=None,
    )


def work_done(record: Record, attempt: str) -> dict[str, int | None]:
    """What the journal says at an attempt's end: its last step, and how many of its steps no checkpoint holds."""
    newest = max((a.saved_step or 0 for a in record.attempts), default=0)
    last_step = next((a.last_step for a in record.attempts if a.attempt == attempt), None)
    return {"last_step": last_step, "steps_lost": max(0, (last_step or 0) - newest)}


def _accounting_record(attempt: Attempt) -> client.AcctRow | None:
    """Slurm's accounting record of this very start of the job: the one that began nearest to it."""
    if attempt.job_id.startswith("local-"):
        return None
    try:
        rows = client.sacct([attempt.job_id], since=attempt.started - 3600.0)
    except SlurmError:
        return None
    begun = [row for row in rows if row.job_id == attempt.job_id and row.start is not None]
    nearest = min(begun, key=lambda row: abs((row.start or 0.0) - attempt.started), default=None)
    if nearest is None or is_alive(nearest.state) or abs((nearest.start or 0.0) - attempt.started) > 120.0:
        return None
    return nearest


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m hpcmoe.runs.arrive RUN_DIR", file=sys.stderr)
        return ERROR
    try:
        return arrive(RunDir(Path(argv[0])), this_place())
    except (UserError, OSError) as error:
        print(f"hpcmoe: {error}", file=sys.stderr)
        return ERROR


if __name__ == "__main__":
    collect_little()
    sys.exit(main(sys.argv[1:]))
