"""From checked points to submitted runs: create the runs, list them as a sweep's points, and let the sweep go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from hpcmoe.config.schema import SweepConfig
from hpcmoe.errors import UserError
from hpcmoe.locks import file_lock
from hpcmoe.runs.advance import Advanced, advance_once
from hpcmoe.runs.control import LOCK_WAIT_S
from hpcmoe.runs.create import Membership, create_run, sync_runs
from hpcmoe.runs.duplicates import finished_runs
from hpcmoe.runs.provenance import FILE, write_provenance
from hpcmoe.runs.sweep import SweepDir, SweepPoint, create_sweep
from hpcmoe.runs.sweep_life import life_of, stop_reason
from hydra_plugins.hpcmoe_launchers import executor_for
from hydra_plugins.hpcmoe_launchers._points import Point, previews


def preview_points(points: Sequence[Point], known: Mapping[str, str]) -> list[JobReturn]:
    """What each point would be as its return value; nothing is written."""
    return [_return(point, preview, "") for point, preview in zip(points, previews(points, known), strict=True)]


def submit_points(
    points: Sequence[Point], master: DictConfig, launcher: str = "hpcmoe", multirun: Multirun | None = None
) -> list[JobReturn]:
    """Create the runs and submit as many as there is room for; the others are held back, and submitted when there is.

    Each value: run_id, job_id (None: held back), run_dir, sweep_dir, index (in the sweep); of a point that is not run,
    ``same_as``: the run that has, or will have, its result. ``multirun``: that of the launcher's earlier batches.

    Raises UserError when Slurm refuses, and says which points are submitted already. Before anything is listed: when the sweep is
    stopped, or keeps to another policy.
    """
    return (multirun or Multirun(launcher)).submit(points, master)


class Multirun:
    """What one multirun knows of its sweep, from its first batch to its last."""

    def __init__(self, launcher: str = "hpcmoe") -> None:
        self._launcher = launcher
        self._sweep: SweepDir | None = None
        self._policy: dict[str, Any] = {}  # the sweep's, and the throttle of this multirun's first batch
        self._before: dict[str, SweepPoint] = {}  # points, by their key, that the sweep had before this multirun
        self._provenance: Path | None = None  # from the first batch on
        self._done = 0

    def submit(self, points: Sequence[Point], master: DictConfig) -> list[JobReturn]:
        policy = policy_of(points)
        for config in {point.config.cluster.scheduler: point.config for point in points}.values():
            executor_for(config, Path())  # where that cannot be, nothing is written
        sweep = self._sweep or self._open(points, master, policy)
        _check_same(sweep, self._policy, _flat(policy))
        with file_lock(sweep.lock, LOCK_WAIT_S) as mine:  # two that add points at once would take the same indices
            if not mine:
                raise UserError(f"sweep {sweep.sweep_id} is being submitted by another process; try again")
            if why := stop_reason(life_of(sweep)):
                again = f"`hpcmoe sweep resume {sweep.sweep_id}` lets it go on"
                raise UserError(f"sweep {sweep.sweep_id} takes no more points: {why}; {again}")
            listed = self._list(sweep, points, bool(policy["skip_finished"]))
        done = advance_once(sweep, wait_s=LOCK_WAIT_S)
        ours = {each.index for each in listed}
        refused = {index: why for index, why in done.refused.items() if index in ours}
        if refused:
            self._withdraw(sweep, listed, refused)
        jobs = life_of(sweep).carriers()
        waiting = [each for each in listed if each.run_id is not None and each.index not in jobs and each.index not in refused]
        if refused or (done.unknown is not None and waiting):
            raise self._not_submitted(sweep, done, refused, len(waiting))
        self._done += len(points)
        return [self._value(sweep, each, point, jobs) for each, point in zip(listed, points, strict=True)]

    def _open(self, points: Sequence[Point], master: DictConfig, policy: dict[str, Any]) -> SweepDir:
        path = Path(str(master.hydra.sweep.dir))
        typed = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)  # '${user.lr}' in it is a point's
        assert isinstance(typed, list)
        scheduler = points[0].config.cluster.scheduler
        words = [str(word) for word in typed]
        sweep = create_sweep(path, launcher=self._launcher, overrides=words, policy=policy, scheduler=scheduler)
        _check_same(sweep, {"scheduler": sweep.facts.get("scheduler", scheduler)}, {"scheduler": scheduler})
        _check_same_throttle(sweep, policy["throttle"])
        self._policy = {**_flat(asdict(SweepConfig())), **_flat(sweep.policy), "throttle": policy["throttle"]}
        self._sweep = sweep
        return sweep

    def _begin(self, sweep: SweepDir) -> Path:
        """What is read and written once, before the first points are listed."""
        self._before = {point.key: point for point in sweep.read_points() if point.key}
        number = 0
        while (home := sweep.shared / str(number)).exists():
            number += 1
        write_provenance(home, str(sweep.facts.get("scheduler")))
        return home / FILE

    def _list(self, sweep: SweepDir, points: Sequence[Point], skip_finished: bool) -> list[SweepPoint]:
        """The sweep's points for these: those that it has already, and new ones, which get runs unless a run has their result."""
        self._provenance = self._provenance or self._begin(sweep)
        finished = finished_runs(sweep.root, {point.key for point in points}) if skip_finished else {}
        index = max((point.index for point in sweep.read_points()), default=-1) + 1
        listed: list[SweepPoint] = []
        new: list[SweepPoint] = []
        try:
            for point in points:
                if point.key in self._before:
                    listed.append(self._before[point.key])
                    continue
                run_id, same_as = None, finished.get(point.key)
                if same_as is None:
                    member = Membership(sweep.path, index, self._provenance)
                    run_id = create_run(point.config, point.overrides, sweep.root, member, point.key).run_id
                new.append(SweepPoint(index, point.overrides, point.key, run_id, same_as, point.gpu_hours, point.shape))
                listed.append(new[-1])
                index += 1
            sync_runs(sweep.run(each.run_id) for each in new if each.run_id is not None)
            if new:
                sweep.append_points(new)
        except BaseException:
            for each in new:
                if each.run_id is not None:
                    shutil.rmtree(sweep.run(each.run_id).path, ignore_errors=True)
            raise
        return listed

    def _withdraw(self, sweep: SweepDir, listed: Sequence[SweepPoint], refused: dict[int, str]) -> None:
        """Runs that Slurm has surely not got are removed."""
        sweep.withdraw(list(refused), next(iter(refused.values())))
        for each in listed:
            if each.index in refused and each.run_id is not None:
                shutil.rmtree(sweep.run(each.run_id).path)

    def _not_submitted(self, sweep: SweepDir, done: Advanced, refused: dict[int, str], waiting: int) -> UserError:
        there = sum(point.run_id is not None for point in sweep.read_points()) - waiting
        before = f"; {there} points are submitted: `hpcmoe sweep status {sweep.sweep_id}`" if there else ""
        if refused:
            return UserError(f"the job is refused: {next(iter(refused.values()))}{before}")
        again = f"`hpcmoe sweep resume {sweep.sweep_id}` tries again"
        return UserError(f"{waiting} runs are planned but not submitted: {done.unknown}; {again}{before}")

    def _value(self, sweep: SweepDir, each: SweepPoint, point: Point, jobs: dict[int, str]) -> JobReturn:
        run = sweep.run(each.result_run)
        value: dict[str, Any] = {
            "run_id": run.run_id,
            "job_id": jobs.get(each.index),
            "run_dir": str(run.path),
            "sweep_dir": str(sweep.path),
            "index": each.index,
        }
        if each.same_as is not None or point.key in self._before:
            value |= {"same_as": run.run_id, "finished": each.same_as is not None}
        return _return(point, value, str(run.path))


_NAMES = {"throttle": "slurm.array_parallelism", "scheduler": "cluster.scheduler"}  # other than sweep.*


def policy_of(points: Sequence[Point]) -> dict[str, Any]:
    """What the sweep as a whole keeps to. Raises UserError where its points do not agree."""
    policies = [{**asdict(p.config.sweep), "throttle": p.config.slurm.array_parallelism} for p in points]
    facts = [{**policy, "scheduler": p.config.cluster.scheduler} for policy, p in zip(policies, points, strict=True)]
    for key, first in facts[0].items():
        other = next((each[key] for each in facts if each[key] != first), first)
        if other != first:
            name = _NAMES.get(key, f"sweep.{key}")
            raise UserError(f"{name} is {first} for one point and {other} for another; it holds for the whole sweep")
    return policies[0]


def _check_same(sweep: SweepDir, there: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises UserError where points that are added want something else than their sweep keeps to: nobody would heed it."""
    for key, value in new.items():
        if key != "skip_finished" and value != there[key]:
            words = _differ(sweep, _NAMES.get(key, f"sweep.{key}"), there[key], value)
            raise UserError(f"{words}; it holds for the whole sweep")


def _check_same_throttle(sweep: SweepDir, throttle: int | None) -> None:
    """The bound may have been changed since the sweep began. Runs without Slurm take turns, whatever it is."""
    now = life_of(sweep).throttle
    if throttle != now and sweep.facts.get("scheduler") != "local":
        words = _differ(sweep, "slurm.array_parallelism", now, throttle)
        raise UserError(f"{words}; `hpcmoe sweep throttle {sweep.sweep_id}` changes the sweep's")


def _differ(sweep: SweepDir, name: str, there: Any, new: Any) -> str:
    return f"{name} is {_word(there)} in sweep {sweep.sweep_id} and {_word(new)} for the points that are added"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flat(policy: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``halving.eta`` and the like as keys."""
    found: dict[str, Any] = {}
    for key, value in policy.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _return(point: Point, value: Any, directory: str) -> JobReturn:
    done = JobReturn(overrides=list(point.overrides), cfg=point.task_config, working_dir=directory)
    done.task_name = "hpcmoe"
    done.status = JobStatus.COMPLETED
    done.return_value = value
    return done
