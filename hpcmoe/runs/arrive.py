"""``python -m hpcmoe.runs.arrive RUN_DIR``: the first thing a job script does, before any rank starts.

Holds the claim (one attempt at a time), closes attempts that ended without a word, and journals this one.
Exit code 0: go on; 3: there is nothing to do here; 2: error, with one line on stderr. Not for what ranks do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from hpcmoe.errors import UserError
from hpcmoe.process import collect_little
from hpcmoe.runs.after import advance_after
from hpcmoe.runs.blame import why_ended
from hpcmoe.runs.budget import budgets_of, give_up_reason, seconds_left, spent_reason
from hpcmoe.runs.claim import holds_claim, release_claim, take_claim
from hpcmoe.runs.ending import cause_of_record
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.lastwords import last_step_done
from hpcmoe.runs.lifecycle import Arrival, Decision, Step, react
from hpcmoe.runs.place import Place, process_start_ticks, this_place
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.settle import settle
from hpcmoe.runs.store import Record, finish, raw_config, read_record, result_state, runs_command
from hpcmoe.runs.story import Attempt, last_sign_of_life
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.parse import expand_hostlist
from hpcmoe.slurm.states import is_alive

GO_ON, ERROR, NOTHING_TO_DO = 0, 2, 3


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
    decision = may_start(record, place, config)
    if decision.step is not Step.START:
        return leave(run, place, decision)
    if not holds_claim(run, place):
        print(f"hpcmoe: another job took run {run.run_id} meanwhile; job {place.job_id} leaves", flush=True)
        return NOTHING_TO_DO
    if config.get("min_nodes"):
        try:
            settle(run, place.attempt, min(place.nodes, int(config["nodes"])))
        except UserError as error:
            reason = f"the {place.nodes} nodes of job {place.job_id} cannot be used: {error}"
            return leave(run, place, Decision(Step.FINISH, "FAILED", reason))
    for folder in (run.attempt(place.attempt), run.control, run.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    previous_end = max((a.ended for a in record.attempts if a.ended is not None), default=None)
    journal_start(run, place, config, previous_end)
    return GO_ON


def may_start(record: Record, place: Place, config: dict) -> Decision:
    """START, or why this attempt does not begin."""
    budgets = budgets_of(config, record.life.max_gpu_hours, record.events)
    gpus, now = gpus_of_attempt(place, config), time.time()
    spent = spent_reason(record.attempts, budgets, now, gpus)
    left = seconds_left(record.attempts, budgets, now, gpus)
    if spent is None and left is not None and place.scheduler == "slurm" and not ends_within(place.job_id, left):
        spent = f"Slurm did not take the time limit that keeps to resilience.max_gpu_hours={budgets.max_gpu_hours:g}"
    arrival = Arrival(place.job_id, give_up_reason(record.attempts_since_resume, budgets), spent)
    return react(record.life, arrival)[1][0]


def ends_within(job_id: str, seconds: float) -> bool:
    """False: the job would go on for longer, and Slurm did not shorten its time limit."""
    try:
        return client.end_within(job_id, seconds)
    except SlurmError as error:
        # nobody to ask on this node: then nobody requeues from here either, and each submission gets its own time limit
        print(f"hpcmoe: the time limit stays as it was submitted: {error}", file=sys.stderr)
        return True


def leave(run: RunDir, place: Place, decision: Decision) -> int:
    """Close the run where that was decided, and hand back the claim."""
    assert decision.state is not None
    match decision.step:
        case Step.FINISH:
            finish(run, decision.state, decision.reason, place.attempt)
        case Step.REST:
            Journal(run.journal, place.attempt).append("rested", state=decision.state, reason=decision.reason)
    release_claim(run, place)
    print(f"hpcmoe: job {place.job_id} leaves run {run.run_id} alone: {decision.reason}", flush=True)
    if decision.step in (Step.FINISH, Step.REST):
        advance_after(run, place.job_id)
    return NOTHING_TO_DO


def gpus_of_attempt(place: Place, config: dict) -> int:
    """GPUs that this attempt holds; 0 where nobody counts them."""
    counted = config["cluster"]["device"] == "cuda" or config["cluster"]["gres"]
    return place.nodes * int(config["gpus_per_node"]) if counted else 0


def journal_start(run: RunDir, place: Place, config: dict, previous_end: float | None) -> None:
    Journal(run.journal, place.attempt).append(
        "attempt_started",
        job_id=place.job_id,
        restart=place.restart,
        nodes=place.nodes,
        hosts=expand_hostlist(place.nodelist) if place.scheduler == "slurm" else [place.nodelist],
        gpus=gpus_of_attempt(place, config),
        end_time=end_of_job(place),
        away_s=None if previous_end is None else round(time.time() - previous_end, 3),  # since the previous attempt's end
        pid=os.getppid(),
        start_ticks=process_start_ticks(os.getppid()),
        engine="command" if runs_command(config) else "hpcmoe",
    )


def end_of_job(place: Place) -> float | None:
    """When Slurm will end this start of the job (epoch s): where its warning comes too late, the ranks leave by themselves.

    None: not known, or at no set time.
    """
    if place.scheduler == "local":
        return None
    with contextlib.suppress(SlurmError):
        facts = client.show_job(place.job_id)
        return facts.end_time if facts is not None else None
    told = os.environ.get("SLURM_JOB_END_TIME", "")  # 23.02 and later; for nodes where nobody can be asked
    return float(told) if told.isdigit() else None


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
    silence = f"ended without a word; Slurm's accounting says {row.state}" if row else "ended without a word"
    cause = cause_of_record(row.state if row else None, record.life.cancel_requested)
    config = raw_config(run)
    cause, said = why_ended(run, attempt.attempt, cause, config)
    Journal(run.journal, attempt.attempt).append(
        "attempt_ended",
        cause=cause.value,
        **work_done(run, record, attempt.attempt, config),
        detail=f"{silence}; {said}" if said else silence,
        ended=ended,
        end_estimated=row is None or row.end is None,
        rc=None,
    )


def work_done(run: RunDir, record: Record, attempt: str, config: dict) -> dict[str, int | None]:
    """What the journal says at an attempt's end: its last step, and how many of its steps no checkpoint holds.

    A rank that is killed while the disk is full takes the lines of its steps with it: then the signs of life say more.
    """
    newest = max((a.saved_step or 0 for a in record.attempts), default=0)
    last_step = next((a.last_step for a in record.attempts if a.attempt == attempt), None)
    if runs_command(config):
        return {"last_step": last_step, "steps_lost": None}  # what its checkpoints hold, it alone knows
    left = any(event["event"] == "left" and event["attempt"] == attempt for event in record.events)
    done = None if left else last_step_done(run, attempt)  # who left in order has told; thousands of files are not read for it
    if done is not None:
        last_step = max(done, last_step or 0)
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
