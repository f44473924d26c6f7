"""``python -m hpcmoe.runs.depart RUN_DIR --rc N --heard "USR1 TERM"``: the last thing a job script does, when no rank is left.

Reads the ranks' verdict, asks Slurm why the job is ending, journals it, and brings the run back or closes it. The exit code
becomes the job's. Decisions are made in hpcmoe.runs.lifecycle; here they are carried out.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from hpcmoe.errors import UserError
from hpcmoe.files import read_json
from hpcmoe.process import collect_little
from hpcmoe.runs.arrive import release_claim, work_done
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.lifecycle import Cause, Decision, Ending, Step, cause_of, decide, give_up_reason
from hpcmoe.runs.place import Place, this_place
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import Record, finish, raw_config, read_record
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.submit import sbatch

OK, FAILED, USAGE, START_AGAIN = 0, 1, 2, 85
LIFT_HOLD_TRIES, LIFT_HOLD_EVERY_S = 20, 0.5


def depart(run: RunDir, place: Place, rc: int, heard: frozenset[str]) -> int:
    """Close this attempt and see to what follows. Returns the exit code for the job."""
    config = raw_config(run)
    record = read_record(run)
    verdict = read_json(run.verdict(place.attempt)) or {}
    ending = _ending(run, place, record, verdict, rc, heard, config)
    cause = cause_of(ending)
    detail = verdict.get("reason") or _detail(run, place, cause, rc)
    journal = Journal(run.journal, place.attempt)
    journal.append(
        "attempt_ended",
        cause=cause.value,
        detail=detail,
        **work_done(record, place.attempt),
        rc=rc,
        heard=sorted(heard),
        job_state=ending.job_state,
        preempt_time=ending.preempt_time,
        end_time=ending.end_time,
    )
    give_up = give_up_reason(read_record(run).attempts_since_resume, int(config["resilience"]["max_attempts_without_progress"]))
    decision = decide(cause, ending, give_up, detail, place.scheduler)
    release_claim(run, place)
    return _carry_out(decision, run, place, journal, config)


def _ending(run: RunDir, place: Place, record: Record, verdict: dict, rc: int, heard: frozenset[str], config: dict) -> Ending:
    ending = Ending(
        now=time.time(),
        verdict=verdict.get("verdict"),
        rc=rc,
        heard=heard,
        cancel_requested=record.cancel_requested,
        stop_lead_s=float(config["resilience"]["stop_lead_s"]),
        hung=run.hang(place.attempt).exists(),
    )
    if place.scheduler == "local":
        return ending
    try:
        facts = client.show_ending(place.job_id)
    except SlurmError as error:
        print(f"hpcmoe: Slurm cannot be asked why this job ends: {error}", file=sys.stderr)
        return ending
    if facts is None:
        return ending
    return replace(
        ending,
        job_state=facts.ended_as or facts.state,
        requeueing=facts.requeueing,
        preempt_time=facts.preempt_time,
        end_time=facts.end_time,
    )


def _detail(run: RunDir, place: Place, cause: Cause, rc: int) -> str | None:
    """For an ending that nobody asked for: the watchdog's or the first rank's last words, or at least the exit code."""
    if cause is Cause.HANG:
        return str((read_json(run.hang(place.attempt)) or {}).get("reason"))
    if cause not in (Cause.CRASHED, Cause.OUT_OF_MEMORY):
        return None
    for path in sorted(run.attempt(place.attempt).glob("error-rank*.txt")):
        lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        if lines:
            return f"{path.stem.removeprefix('error-')}: {lines[-1].strip()[:300]}"
    return f"the ranks left with exit code {rc}" + (f" (signal {rc - 128})" if rc > 128 else "")


def _carry_out(decision: Decision, run: RunDir, place: Place, journal: Journal, config: dict) -> int:
    match decision.step:
        case Step.FINISH:
            assert decision.state is not None
            finish(run, decision.state, decision.reason, place.attempt)
            print(f"hpcmoe: run {run.run_id} is {decision.state}" + (f": {decision.reason}" if decision.reason else ""))
            return OK if decision.state == "COMPLETED" else FAILED
        case Step.REST:
            journal.append("rested", state=decision.state, reason=decision.reason)
            print(f"hpcmoe: run {run.run_id} rests: {decision.reason}; `hpcmoe resume {run.run_id}` continues it")
            return OK
        case Step.SLURM_BRINGS_BACK:
            journal.append("requeued", job_id=place.job_id, by="slurm")
            _lift_hold(place, journal, config)
            return OK
        case Step.COME_BACK:
            return START_AGAIN if place.scheduler == "local" else _come_back(run, place, journal, config)


def _come_back(run: RunDir, place: Place, journal: Journal, config: dict) -> int:
    """Requeue this job; where that is refused, submit a successor that waits for this job's end."""
    try:
        client.requeue(place.job_id)
    except SlurmError as refused:
        journal.append("requeue_refused", job_id=place.job_id, reason=str(refused))
    else:
        journal.append("requeued", job_id=place.job_id, by="hpcmoe")
        _lift_hold(place, journal, config)
        return OK
    if not config["resilience"]["successor"]:
        journal.append("stranded", reason="requeue was refused, and resilience.successor is false")
        return START_AGAIN
    return _submit_successor(run, place, journal)


def _submit_successor(run: RunDir, place: Place, journal: Journal) -> int:
    token = f"{run.run_id}-after-{place.attempt}".replace(".", "-")
    try:
        job_id = sbatch(run.script, [f"--dependency=afterany:{place.job_id}"], token=token)
    except SlurmError as refused:
        journal.append("stranded", reason=f"neither requeue nor a successor: {refused}")
        print(f"hpcmoe: run {run.run_id} could not be brought back from here; `hpcmoe resume {run.run_id}` does", file=sys.stderr)
        return START_AGAIN
    journal.append("submitted", job_id=job_id, how="successor", after=place.job_id)
    return START_AGAIN


def _lift_hold(place: Place, journal: Journal, config: dict) -> None:
    """A requeued job waits for cred_expire + 1 s (121 s by default) unless its owner asks for an earlier start."""
    if not config["resilience"]["lift_hold"]:
        return
    for _ in range(LIFT_HOLD_TRIES):
        try:
            if client.start_soon(place.job_id):
                journal.append("hold_lifted", job_id=place.job_id)
                return
        except SlurmError as error:
            print(f"hpcmoe: the hold after the requeue stays: {error}", file=sys.stderr)
            return
        time.sleep(LIFT_HOLD_EVERY_S)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpcmoe.runs.depart")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--rc", type=int, required=True, help="exit code of srun, or of the worst local rank")
    parser.add_argument("--heard", default="", help="signals that the batch shell heard, e.g. 'USR1 TERM'")
    args = parser.parse_args(argv)
    try:
        return depart(RunDir(args.run_dir), this_place(), args.rc, frozenset(args.heard.split()))
    except (UserError, OSError) as error:
        print(f"hpcmoe: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    collect_little()
    sys.exit(main(sys.argv[1:]))
