"""Going on with a sweep: submit points for which there is room now, share its throttle among its arrays, stop it after failures.

Whoever learns that something ended calls ``advance``: each element as it leaves, a supervisor in each round, a resume. Nobody
must stay awake for it. What is done next is decided in hpcmoe.runs.pace; here it is looked at and carried out.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcmoe.errors import UserError
from hpcmoe.locks import file_lock
from hpcmoe.runs.arrays import NoRoom, settle_intent, submit_batch
from hpcmoe.runs.control import promote
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.life import WAITING_STATES
from hpcmoe.runs.lifecycle import FIRST_PAUSE_S, LONGEST_PAUSE_S
from hpcmoe.runs.pace import Facts, Policy, Queued, SetShare, Stop, Submit, decide
from hpcmoe.runs.promote import due_promotions
from hpcmoe.runs.store import raw_config, read_record, result_of, result_state
from hpcmoe.runs.sweep import SweepDir, SweepPoint
from hpcmoe.runs.sweep_life import SweepLife, anything_to_do, grouped, life_of, stop_reason
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError, SlurmRejected
from hpcmoe.slurm.limits import MyJob, SubmitLimit, my_jobs, submit_limits
from hpcmoe.slurm.parse import compress_job_ids

_TOKEN_OF = re.compile(r"hpcmoe:([a-z0-9]+)-\d+")  # the comment of a run's own job


@dataclass
class Advanced:
    """What became of one look at a sweep."""

    said: list[str] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)  # points that Slurm does not take, each with its reason
    unknown: str | None = None  # Slurm did not say whether it has a job


def advance(sweep: SweepDir, *, leaving: str | None = None, wait_s: float = 0.0) -> list[str]:
    """Do what can be done for the sweep now; returns lines for people. Of several that do so at once one acts, for all.

    ``leaving``: the job of an element that ends for good and is still there. ``wait_s``: how long to wait for another one.
    Raises UserError where the sweep cannot be read. That Slurm does not answer, or refuses, is said and tried again next time.
    """
    return advance_once(sweep, leaving, wait_s).said


def advance_once(sweep: SweepDir, leaving: str | None = None, wait_s: float = 0.0) -> Advanced:
    """The same, with what a launcher must know."""
    done = Advanced()
    if not anything_to_do(sweep):
        return done
    _ask(sweep)
    while True:
        with file_lock(sweep.lock, wait_s) as mine:
            if not mine:
                return done  # whoever holds the lock looks again, as it was asked to
            asked = _asked(sweep)
            _advance(sweep, leaving, done)
        if _asked(sweep) == asked:
            return done


# One that finds the lock taken leaves; the holder may have looked before the other's end. So each says first that it came.


def _ask(sweep: SweepDir) -> None:
    with sweep.asked.open("ab") as file:
        file.write(b".")


def _asked(sweep: SweepDir) -> int:
    try:
        fd = os.open(sweep.asked, os.O_RDONLY)  # opening asks a network file system anew
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _policy(sweep: SweepDir) -> Policy:
    given = sweep.policy
    return Policy(given.get("max_failures"), str(given.get("on_max_failures") or "drain"))


def _advance(sweep: SweepDir, leaving: str | None, done: Advanced) -> None:
    points = sweep.read_points()
    life = life_of(sweep)
    try:
        if life.intent is not None:
            if not settle_intent(sweep, life.intent):
                return
            life = life_of(sweep)
        life = _promote(sweep, points, life, done)
        seen = _look(sweep, points, life, leaving)
        for action in decide(_policy(sweep), seen.facts):
            match action:
                case SetShare():
                    _set_share(sweep, life, seen, action)
                case Submit():
                    if not _submit(sweep, seen, action, leaving, done):
                        break
                case Stop():
                    stop(sweep, points, life, seen.jobs, action.reason, action.running)
                    done.said.append(f"sweep {sweep.sweep_id} is stopped: {action.reason}")
    except SlurmError as error:
        done.unknown = str(error)
        done.said.append(f"sweep {sweep.sweep_id} waits, as Slurm cannot be asked: {error}")
        return
    _tell_held_back(sweep, seen, done)


def _promote(sweep: SweepDir, points: Sequence[SweepPoint], life: SweepLife, done: Advanced) -> SweepLife:
    """Paused runs that are among the best of their rung now join those that wait to be submitted."""
    if stop_reason(life):
        return life
    for point, one in due_promotions(sweep, points, {waiting.index for waiting in life.waiting(points)}):
        sweep.journal("promoted", points=[point.index], run_id=one.run_id, rung=one.rung, reason=one.reason)
        if promote(sweep.run(one.run_id), one.rung):
            done.said.append(f"run {one.run_id} goes on after rung {one.rung} (step {one.step}): {one.reason}")
    return life_of(sweep)


@dataclass(frozen=True)
class Seen:
    """The facts, and what they were taken from."""

    facts: Facts
    points: dict[int, SweepPoint]
    jobs: tuple[MyJob, ...] = ()  # all of the user's
    limit: SubmitLimit | None = None  # the one that leaves the least room


def _look(sweep: SweepDir, points: Sequence[SweepPoint], life: SweepLife, leaving: str | None) -> Seen:
    waiting = [] if stop_reason(life) or _pauses(life) else _still_waiting(sweep, life.waiting(points))
    groups = grouped(waiting)
    configs = [raw_config(sweep.run(str(group[0].run_id))) for group in groups]
    local = sweep.facts.get("scheduler") == "local"
    limits = [] if local else _limits(configs)
    jobs = tuple(my_jobs(getpass.getuser())) if not local and (life.jobs or limits) else ()
    limit = min(limits, key=lambda one: one.left(jobs), default=None)
    single = local or all(len(group) == 1 for group in groups) or any(_is_local(config) for config in configs)
    facts = Facts(
        queued=() if local else tuple(queued(sweep, points, life, jobs, leaving)),
        waiting=tuple(tuple(point.index for point in group) for group in groups),
        throttle=None if local else life.throttle,
        room=limit.left(jobs) if limit is not None else None,
        room_of=limit.most if limit is not None else None,
        most=1 if single else client.cluster_facts().max_array_size,
        failures=_failures(sweep, points, life.resumed_at) if _policy(sweep).max_failures is not None else 0,
        stopped=stop_reason(life) is not None,
        leaving=leaving is not None and any(job.job_id == leaving for job in jobs),
    )
    return Seen(facts, {point.index: point for point in points}, jobs, limit)


def _still_waiting(sweep: SweepDir, points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Without those that their user has cancelled, or deleted, one by one."""
    gone = [p for p in points if result_state(run := sweep.run(str(p.run_id))) is not None or not run.journal.exists()]
    if gone:
        sweep.journal("submitted_elsewhere", points=[point.index for point in gone])
    return [point for point in points if point not in gone]


def _pauses(life: SweepLife) -> bool:
    """What Slurm refused for good reason it is asked ever more seldom."""
    pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (life.refusals - 1)) if life.refusals else 0.0
    return time.time() < life.refused_at + pause


def _is_local(config: Mapping[str, Any]) -> bool:
    return bool(config["cluster"]["scheduler"] == "local")


def _limits(configs: Sequence[Mapping[str, Any]]) -> list[SubmitLimit]:
    words = {tuple(config["slurm"].get(name) for name in ("account", "qos", "partition")) for config in configs}
    return [
        limit for account, qos, part in sorted(words, key=str) for limit in submit_limits(getpass.getuser(), account, qos, part)
    ]


def _failures(sweep: SweepDir, points: Sequence[SweepPoint], since: float) -> int:
    """Runs that FAILED since the sweep's last resume (``since``, epoch s); those before it its user has seen."""
    results = (result_of(sweep.run(point.run_id)) for point in points if point.run_id is not None)
    return sum(result.get("state") == "FAILED" and float(result.get("t") or 0.0) >= since for result in results)


def queued(
    sweep: SweepDir, points: Sequence[SweepPoint], life: SweepLife, jobs: Sequence[MyJob], leaving: str | None
) -> list[Queued]:
    """The sweep's jobs that have not ended: its arrays, in their order, then the jobs that runs came back in."""
    arrays: dict[str, list[MyJob]] = {job.job_id: [] for job in life.jobs}
    runs = {point.run_id for point in points if point.run_id is not None}
    own: list[MyJob] = []
    for job in jobs:
        if job.job in arrays:
            arrays[job.job].append(job)
        elif (match := _TOKEN_OF.search(job.comment)) and match[1] in runs:
            own.append(job)
    sizes = {job.job_id: len(job.points) for job in life.jobs}
    found = []
    for job_id, elements in [*arrays.items(), *((job.job, [job]) for job in own)]:
        staying = [job for job in elements if job.job_id != leaving]
        if elements:
            running = sum(job.state not in WAITING_STATES for job in staying)
            found.append(Queued(job_id, len(staying), running, life.shares.get(job_id), array=sizes.get(job_id, 1) > 1))
    return found


def _set_share(sweep: SweepDir, life: SweepLife, seen: Seen, action: SetShare) -> None:
    """An array that has ended meanwhile is no trouble.

    Where elements of an array have ended Slurm says no for these and does it for the others: what was asked counts as done.
    """
    job = next(job for job in seen.facts.queued if job.job_id == action.job_id)
    calls: list[Callable[[], None]] = []
    if action.share == 0:
        calls.append(lambda: client.hold(action.job_id))
    elif job.array:
        calls.append(lambda: client.limit_array(action.job_id, action.share))
    if action.share != 0 and job.share == 0:
        calls.append(lambda: client.release(action.job_id))
    for call in calls:
        with contextlib.suppress(SlurmRejected):
            call()
    sweep.journal("share", job_id=action.job_id, to=action.share)


def _submit(sweep: SweepDir, seen: Seen, action: Submit, leaving: str | None, done: Advanced) -> bool:
    """Submit the batch, or as many of its points as Slurm takes. False: there is no room for more."""
    todo = [seen.points[index] for index in action.points]
    size, after = len(todo), leaving if seen.facts.leaving else None
    while todo:
        try:
            job = submit_batch(sweep, todo[:size], action.share, after, others=lambda: len(seen.jobs) or _others())
        except NoRoom:
            if size == 1:
                return False
            size = (size + 1) // 2
            continue
        except UserError as refused:
            if isinstance(refused, SlurmError) and not isinstance(refused, SlurmRejected):
                raise
            done.refused.update(dict.fromkeys((point.index for point in todo), str(refused)))
            done.said.append(f"sweep {sweep.sweep_id}: Slurm refuses the job of {len(todo)} points: {refused}")
            return True
        if job is None:
            return False
        done.said.append(f"sweep {sweep.sweep_id}: {size} of its points submitted as job {job}")
        if size < len(action.points):
            return False  # that was all there is room for
        todo = todo[size:]
    return True


def _others() -> int:
    try:
        return len(my_jobs(getpass.getuser()))
    except SlurmError:
        return 0


def _tell_held_back(sweep: SweepDir, seen: Seen, done: Advanced) -> None:
    life = life_of(sweep)
    waiting = [point for point in life.waiting(seen.points.values()) if point.index not in done.refused]
    if not waiting or stop_reason(life) or _pauses(life):
        return
    if seen.limit is not None and seen.facts.room is not None and seen.facts.room < len(waiting):
        reason = f"the user may have {seen.limit.most} jobs at once ({seen.limit.name})"
    elif life.throttle is not None and not seen.facts.stopped and sum(job.left for job in seen.facts.queued) >= life.throttle:
        reason = f"at most {life.throttle} run at once"
    else:
        reason = "Slurm takes no more jobs of the user for now"
    if reason != life.held_back:
        sweep.journal("held_back", points=[point.index for point in waiting], reason=reason)
        done.said.append(f"sweep {sweep.sweep_id}: {len(waiting)} points are held back: {reason}")


def stop(
    sweep: SweepDir, points: Sequence[SweepPoint], life: SweepLife, jobs: Sequence[MyJob], reason: str, running: bool
) -> None:
    """Start no more: what never started rests until a resume. ``running``: the others save and stop, too."""
    sweep.journal("stopped", reason=reason, running=running)
    local = sweep.facts.get("scheduler") == "local"
    states = {job.job_id: job.state for job in jobs}
    waiting = {point.index for point in life.waiting(points)}
    carriers = life.carriers()
    ids: list[str] = []
    for point in points:
        run = sweep.run(point.run_id or "")
        if point.run_id is None or result_state(run) is not None:
            continue
        job_id = read_record(run).job_id or carriers.get(point.index, "")  # it may have come back in a job of its own
        began = run.attempts.exists()
        pends = not began if local else states.get(job_id) in WAITING_STATES
        if point.index in waiting or (pends and (running or not began)):
            Journal(run.journal).append_unsynced("rested", state="STOPPED", reason=f"its sweep was stopped: {reason}")
            ids += [job_id] if job_id in states and point.index not in waiting else []
        elif running and (local or job_id in states):
            run.control.mkdir(exist_ok=True)
            (run.control / "stop").touch()
    client.cancel(compress_job_ids(ids))
