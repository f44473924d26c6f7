"""What a login node does for a run that Slurm would leave alone: lift a hold, submit it again, close it. For wait and supervise.

The decisions are hpcmoe.runs.lifecycle's. Safe to run twice at once: see hpcmoe.runs.submission.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from hpcmoe.errors import UserError
from hpcmoe.runs.arrive import close_silent_attempts
from hpcmoe.runs.budget import budgets_of, give_up_reason, not_before, spent_reason
from hpcmoe.runs.estimate import counted_gpus
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.lastwords import last_lines
from hpcmoe.runs.lifecycle import Decision, Look, Step, react
from hpcmoe.runs.observe import RunView, observe
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import finish, raw_config, read_record
from hpcmoe.runs.submission import elsewhere, looked_for, submission_lock, writer_gone
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError

# Ends that a requeued job may pass through on its way back into the queue: they must still stand at a second look.
MAY_COME_BACK, SECOND_LOOK_S = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REQUEUED"}), 2.0
Deed = dict[str, Any]  # what was done, for people and for --json: run_id, did, text, ...


def help_on(seen: RunView, tell: Callable[[Deed], None]) -> bool:
    """Do what ``seen`` calls for. False when the run cannot be brought back, and the user must look at it.

    What is not asked of Slurm alone is decided anew, on a fresh look, while the run's submission lock is held.
    """
    run = seen.record.run
    decision = _decision(seen)
    if decision is None:
        return True
    if decision.step is Step.LIFT_HOLD:
        _lift_hold(seen, tell)
        return True
    with submission_lock(run) as mine:
        if not mine:
            return True  # another supervisor is at it
        if seen.job.state in MAY_COME_BACK:
            time.sleep(SECOND_LOOK_S)
        now = observe([read_record(run)])[0]
        decision = _decision(now)
        if decision is not None and decision.step is Step.LOOK_FOR:
            if not looked_for(now.record.life):
                return True
            now = observe([read_record(run)])[0]  # that took a while
            decision = _decision(now, looked=decision.token)
        return decision is None or _act(decision, now, tell)


def _decision(seen: RunView, looked: str | None = None) -> Decision | None:
    """``looked``: the token of the submission whose job has been looked for."""
    life = seen.record.life
    known = life.intent is not None and life.intent["token"] == looked
    look = Look(seen.job, time.time(), writer_gone(life, seen.job), elsewhere(life), known)
    return next(iter(react(life, look, seen.record.run.run_id)[1]), None)


def _act(decision: Decision, seen: RunView, tell: Callable[[Deed], None]) -> bool:
    run = seen.record.run

    def told(did: str, text: str, **facts: Any) -> None:
        tell({"run_id": run.run_id, "did": did, "text": f"run {run.run_id} {text}", **facts})

    match decision.step:
        case Step.SUBMIT:
            return _submit(decision, seen, told)
        case Step.REST:
            return _rest(run, str(decision.reason), told)
        case Step.FINISH:
            assert decision.state is not None
            close_silent_attempts(run, None)
            finish(run, decision.state, decision.reason)
            told("finished", f"is {decision.state}: {decision.reason}")
    return True


def _rest(run: RunDir, reason: str, told: Callable[..., None]) -> bool:
    Journal(run.journal).append("rested", state="STOPPED", reason=reason)
    told("rested", f"stopped ({reason}), and is left for you to look at")
    return False


def _submit(decision: Decision, seen: RunView, told: Callable[..., None]) -> bool:
    """Submit the run, unless its budgets say no."""
    from hpcmoe.config.freeze import load_frozen
    from hpcmoe.runs.create import submit_run

    run = seen.record.run
    close_silent_attempts(run, None)
    record = read_record(run)
    config = load_frozen(run.config)
    budgets = budgets_of({"resilience": vars(config.resilience)}, record.life.max_gpu_hours, record.events)
    give_up = give_up_reason(record.attempts_since_resume, budgets)
    if give_up is not None:
        said = last_lines(run, record.attempts[-1].attempt)
        finish(run, "FAILED", give_up, last_lines=said)
        told("finished", f"is FAILED: {give_up}")
        return False
    spent = spent_reason(record.attempts, budgets, time.time(), counted_gpus(config))
    if spent is not None:
        return _rest(run, spent, told)
    until = not_before(record.attempts_since_resume, budgets, time.time())
    try:
        job_id = submit_run(run, config, "supervisor", until, seen.record.life.intent, decision.token)
    except UserError as error:
        told("not_submitted", f"stopped ({decision.reason}) and cannot be brought back: {error}", problem=str(error))
        return False
    told("submitted", f"stopped ({decision.reason}); submitted again as job {job_id}", job_id=job_id, reason=decision.reason)
    return True


def _lift_hold(seen: RunView, tell: Callable[[Deed], None]) -> None:
    """Start a requeued job soon instead of after Slurm's credential lifetime."""
    run, job_id = seen.record.run, seen.record.job_id
    assert job_id is not None
    if not raw_config(run)["resilience"]["lift_hold"]:
        return
    with contextlib.suppress(SlurmError):
        if client.start_soon(job_id):
            Journal(run.journal).append("hold_lifted", job_id=job_id)
            text = f"run {run.run_id}: the hold after the requeue is lifted"
            tell({"run_id": run.run_id, "did": "hold_lifted", "text": text, "job_id": job_id})
