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
from hpcmoe.runs.after import advance_after
from hpcmoe.runs.arrive import gpus_of_attempt, work_done
from hpcmoe.runs.blame import exclude_flag, stay_away, why_ended
from hpcmoe.runs.budget import budgets_of, give_up_reason, not_before, seconds_left, spent_reason, time_flag
from hpcmoe.runs.claim import release_claim
from hpcmoe.runs.ending import Cause, Ending, cause_of
from hpcmoe.runs.journal import Journal, PatientJournal
from hpcmoe.runs.lastwords import detail_of, last_lines
from hpcmoe.runs.lead import AUTO, lead_of_job_s, next_lead_s
from hpcmoe.runs.lifecycle import Decision, Departure, Step, react
from hpcmoe.runs.notify import send_end
from hpcmoe.runs.place import Place, this_place
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.rungs import paused_at
from hpcmoe.runs.store import Record, finish, raw_config, read_record, runs_command
from hpcmoe.runs.submission import begin
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError, SlurmUnreachable
from hpcmoe.slurm.submit import begin_flag, sbatch

OK, FAILED, USAGE, START_AGAIN = 0, 1, 2, 85
LIFT_HOLD_TRIES, LIFT_HOLD_EVERY_S = 20, 0.5
PAUSE_LOOK_S = 0.5


def depart(run: RunDir, place: Place, rc: int, heard: frozenset[str]) -> int:
    """Close this attempt and see to what follows. Returns the exit code for the job."""
    config = raw_config(run)
    record = read_record(run)
    verdict = read_json(run.verdict(place.attempt)) or {}
    ending = _ending(run, place, record, verdict, rc, heard, config)
    cause, said = why_ended(run, place.attempt, cause_of(ending), config)
    detail = verdict.get("reason") or said or detail_of(run, place.attempt, cause, rc)
    journal = PatientJournal(run.journal, place.attempt)  # a full disk must not keep the run from coming back
    journal.append(
        "attempt_ended",
        cause=cause.value,
        detail=detail,
        **work_done(run, record, place.attempt, config),
        rc=rc,
        heard=sorted(heard),
        job_state=ending.job_state,
        preempt_time=ending.preempt_time,
        end_time=ending.end_time,
    )
    record = read_record(run)
    budgets = budgets_of(config, record.life.max_gpu_hours, record.events)
    departure = Departure(
        place.job_id,
        cause,
        ending,
        place.scheduler,
        detail,
        give_up=give_up_reason(record.attempts_since_resume, budgets),
        spent=spent_reason(record.attempts, budgets, time.time(), gpus_of_attempt(place, config)),
        rung=paused_at(record.events, place.attempt) if cause is Cause.PAUSED else None,
    )
    decisions = react(record.life, departure)[1]
    release_claim(run, place)
    until = not_before(record.attempts_since_resume, budgets, time.time())
    code = next((_carry_out(decision, run, place, journal, config, until) for decision in decisions), OK)
    if any(decision.step in (Step.FINISH, Step.REST) for decision in decisions):
        advance_after(run, place.job_id)
    return code


def _ending(run: RunDir, place: Place, record: Record, verdict: dict, rc: int, heard: frozenset[str], config: dict) -> Ending:
    ending = Ending(
        now=time.time(),
        verdict=verdict.get("verdict"),
        rc=rc,
        heard=heard,
        cancel_requested=record.life.cancel_requested,
        stop_lead_s=float(lead_of_job_s(config["resilience"]["stop_lead_s"], record.events, place.job_id)),
        source=verdict.get("source"),
        hung=run.hang(place.attempt).exists(),
        agreed=not runs_command(config),
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


def _carry_out(decision: Decision, run: RunDir, place: Place, journal: Journal, config: dict, until: float | None) -> int:
    """``until``: epoch seconds before which the run should not start again."""
    match decision.step:
        case Step.FINISH:
            assert decision.state is not None
            said = last_lines(run, place.attempt) if decision.state == "FAILED" else []
            finish(run, decision.state, decision.reason, place.attempt, last_lines=said)
            print(f"hpcmoe: run {run.run_id} is {decision.state}" + (f": {decision.reason}" if decision.reason else ""))
            print(*said, sep="\n", end="\n" if said else "", flush=True)
            send_end(run)
            return OK if decision.state == "COMPLETED" else FAILED
        case Step.REST:
            at_rung = {} if decision.rung is None else {"rung": decision.rung}
            journal.append("rested", state=decision.state, reason=decision.reason, **at_rung)
            print(f"hpcmoe: run {run.run_id} rests: {decision.reason}; `hpcmoe resume {run.run_id}` continues it", flush=True)
            send_end(run)
            return OK
        case Step.SLURM_BRINGS_BACK:
            journal.append("requeued", job_id=place.job_id, by="slurm")
            stay_away(run, place.job_id, place.attempt, config)
            _set_start(place, journal, config, until)
            return OK
        case Step.COME_BACK:
            if place.scheduler == "local":
                return _pause(run, place, journal, until)
            return _come_back(run, place, journal, config, until)
    raise AssertionError(decision)


def _come_back(run: RunDir, place: Place, journal: Journal, config: dict, until: float | None) -> int:
    """Requeue this job; where that is refused, submit a successor that waits for this job's end."""
    try:
        client.requeue(place.job_id)
    except SlurmError as refused:
        journal.append("requeue_refused", job_id=place.job_id, reason=str(refused))
    else:
        journal.append("requeued", job_id=place.job_id, by="hpcmoe")
        stay_away(run, place.job_id, place.attempt, config)
        _set_start(place, journal, config, until)
        return OK
    if not config["resilience"]["successor"]:
        journal.append("stranded", reason="requeue was refused, and resilience.successor is false")
        return START_AGAIN
    return _submit_successor(run, place, journal, config, until)


def _submit_successor(run: RunDir, place: Place, journal: Journal, config: dict, until: float | None) -> int:
    record = read_record(run)
    budgets, gpus = budgets_of(config, record.life.max_gpu_hours, record.events), gpus_of_attempt(place, config)
    auto = config["resilience"]["stop_lead_s"] == AUTO
    told = {"stop_lead_s": next_lead_s(AUTO, record.events, config["slurm"]["time"])} if auto else {}
    left = seconds_left(record.attempts, budgets, time.time(), gpus)
    token = record.life.token(run.run_id)
    if not begin(run, token, "successor", attempt=place.attempt):
        print(f"hpcmoe: run {run.run_id} is being submitted by somebody else", file=sys.stderr)
        return START_AGAIN
    try:
        _own_script(run, token)
        flags = [*time_flag(left, config["slurm"]["time"]), *begin_flag(until), *exclude_flag(run, config)]
        flags += [f"--signal=B:USR1@{told['stop_lead_s']}"] if told else []
        flags.append(f"--dependency=afterany:{place.job_id}")
        job_id = sbatch(run.script, flags, token=token)
    except UserError as refused:
        journal.append("submit_failed" if isinstance(refused, SlurmUnreachable) else "submit_refused", reason=str(refused))
        journal.append("stranded", reason=f"neither requeue nor a successor: {refused}")
        print(f"hpcmoe: run {run.run_id} could not be brought back from here; `hpcmoe resume {run.run_id}` does", file=sys.stderr)
        return START_AGAIN
    journal.append("submitted", job_id=job_id, how="successor", after=place.job_id, not_before=until, **told)
    return START_AGAIN


def _own_script(run: RunDir, token: str) -> None:
    """The job script of a run that was an element of an array so far."""
    if not run.script.exists():
        from hpcmoe.config.freeze import load_frozen
        from hpcmoe.runs.jobspec import job_spec
        from hpcmoe.runs.scripts import write_scripts

        write_scripts(job_spec(run, load_frozen(run.config), token))


def _set_start(place: Place, journal: Journal, config: dict, until: float | None) -> None:
    """A requeued job waits for cred_expire + 1 s (121 s by default) unless its owner asks for another start.

    Earlier, as a rule; later where failures or preemptions come thick (``until``, epoch s).
    """
    if until is not None:
        journal.append("put_off", job_id=place.job_id, until=until)
    elif not config["resilience"]["lift_hold"]:
        return
    for _ in range(LIFT_HOLD_TRIES):
        try:
            if client.start_soon(place.job_id, until):
                if until is None:
                    journal.append("hold_lifted", job_id=place.job_id)
                return
        except SlurmError as error:
            print(f"hpcmoe: the hold after the requeue stays: {error}", file=sys.stderr)
            return
        time.sleep(LIFT_HOLD_EVERY_S)


def _pause(run: RunDir, place: Place, journal: Journal, until: float | None) -> int:
    """On a machine without Slurm the job script itself waits, and may be told to stop meanwhile."""
    if until is None or until <= time.time():
        return START_AGAIN
    journal.append("put_off", job_id=place.job_id, until=until)
    heard_before = run.notice(place.attempt).exists()
    while (left := until - time.time()) > 0:
        time.sleep(min(PAUSE_LOOK_S, left))
        if read_record(run).life.cancel_requested:
            finish(run, "CANCELLED", "cancelled by its user", place.attempt)
            return FAILED
        if (run.control / "stop").exists() or (not heard_before and run.notice(place.attempt).exists()):
            journal.append("rested", state="STOPPED", reason="told to stop before its next start")
            return OK
    return START_AGAIN


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
