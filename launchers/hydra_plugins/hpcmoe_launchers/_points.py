"""The points of a multirun, each composed and checked; nothing is written here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import filter_overrides, setup_globals
from omegaconf import DictConfig, open_dict

from hpcmoe.config.compose import to_config
from hpcmoe.config.explain import as_user_error
from hpcmoe.config.freeze import to_plain
from hpcmoe.config.key import config_key
from hpcmoe.config.schema import Config
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.planner.check import ManyPlans
from hpcmoe.runs.create import ceiling_flag
from hpcmoe.runs.duplicates import finished_runs
from hpcmoe.runs.estimate import confirm, counted_gpus, estimate_gpu_hours, estimate_hours
from hpcmoe.runs.jobspec import job_shape
from hpcmoe.runs.registry import runs_root
from hpcmoe.runs.sweep import SweepDir
from hpcmoe.runs.sweep_plan import PlannedPoint, forecast, plan_text, refusal
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError

SLURMS_MAX_ARRAY_SIZE = 1001  # where Slurm cannot be asked for the site's


@dataclass(frozen=True)
class Point:
    """One point of the sweep, checked."""

    index: int  # in the multirun
    overrides: tuple[str, ...]
    task_config: DictConfig | None  # as composed, for a sweeper that looks at it; without Hydra's own node
    config: Config
    gpu_hours: float | None  # an estimate
    shape: str  # hpcmoe.runs.jobspec.job_shape
    key: str  # hpcmoe.config.key
    hours: float | None = None  # on its nodes, an estimate


def compose_points(
    loader: ConfigLoader, master: DictConfig, job_overrides: Sequence[Sequence[str]], first_index: int
) -> list[Point]:
    """Every point of the sweep. Raises UserError when any is no valid run, and names all that are not."""
    setup_globals()
    outer = HydraConfig.instance().cfg
    planner = ManyPlans()
    points: list[Point] = []
    problems: list[tuple[int, Sequence[str], str]] = []
    try:
        for index, overrides in enumerate(job_overrides, first_index):
            try:
                points.append(_compose(loader, planner, master, overrides, index))
            except UserError as error:
                problems.append((index, filter_overrides(overrides), str(error)))
    finally:
        HydraConfig.instance().cfg = outer
    if problems:
        raise UserError(refusal(problems, len(job_overrides)))
    return points


def _compose(loader: ConfigLoader, planner: ManyPlans, master: DictConfig, overrides: Sequence[str], index: int) -> Point:
    with as_user_error():
        composed = loader.load_sweep_config(master, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = str(index)
        composed.hydra.job.num = index
    HydraConfig.instance().cfg = composed  # type: ignore[assignment]  # what ${hydra:...} in the config refers to; set_config would copy it
    config = validate(to_config(composed))
    speed = planner.prepare(config)
    gpu_hours, hours = estimate_gpu_hours(config, speed), estimate_hours(config, speed)
    ceiling_flag(config)
    shape = job_shape(config)  # what a job script cannot carry is found here, before anything is written
    words = tuple(filter_overrides(overrides))
    with open_dict(composed):
        composed.pop("hydra")
    return Point(index, words, composed, config, gpu_hours, shape, config_key(to_plain(config)), hours)


@dataclass(frozen=True)
class Preview:
    """A dry run's answer for one point."""

    planned: PlannedPoint
    config: Config
    at_once: int | None  # most runs of the sweep at once; None: no bound
    most_elements: int | None  # of one array; None: there are no arrays here


def runs_by_key(sweep: SweepDir) -> dict[str, str]:
    """The runs that have, or will have, the results of a sweep's points."""
    return {point.key: point.result_run for point in sweep.read_points() if point.key}


def not_run(points: Sequence[Point], there: Mapping[str, str]) -> dict[str, str]:
    """By key: runs of points that are not run again: those of the sweep (``there``), or such that have COMPLETED."""
    if not points[0].config.sweep.skip_finished:
        return dict(there)
    return {**finished_runs(runs_root(), {point.key for point in points}), **there}


def previews(points: Sequence[Point], known: Mapping[str, str]) -> list[Preview]:
    """What would be submitted of these points, and how they go together. ``known``: by key, runs of points that are not run."""
    local = all(point.config.cluster.scheduler == "local" for point in points)
    throttle = points[0].config.slurm.array_parallelism
    at_once, most = (1, None) if local else (throttle, _most_elements())  # local runs take turns
    return [Preview(_planned(point, known.get(point.key)), point.config, at_once, most) for point in points]


def _planned(point: Point, same_as: str | None) -> PlannedPoint:
    gpus = counted_gpus(point.config)
    return PlannedPoint(point.index, point.overrides, gpus, point.hours, point.gpu_hours, point.shape, same_as)


def _most_elements() -> int:
    try:
        return client.cluster_facts().max_array_size
    except SlurmError:
        return SLURMS_MAX_ARRAY_SIZE


def show_plan(points: Sequence[Point], known: Mapping[str, str]) -> None:
    """The table of points and the whole, for a person."""
    seen = previews(points, known)
    planned = [one.planned for one in seen]
    print(plan_text(planned, forecast(planned, seen[0].at_once, seen[0].most_elements)), file=sys.stderr)


def confirm_points(points: Sequence[Point], yes: bool) -> None:
    """Ask before a costly sweep: the points together, by the lowest bound that one of them sets. Raises UserError for a no."""
    bounds = [point.config.resilience.ask_above_gpu_hours for point in points]
    confirm([point.gpu_hours for point in points], min((bound for bound in bounds if bound is not None), default=None), yes)
