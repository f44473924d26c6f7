"""The points of a multirun, each composed and checked; nothing is written here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import filter_overrides, setup_globals
from omegaconf import DictConfig, open_dict

from hpcmoe.config.compose import to_config
from hpcmoe.config.freeze import to_plain
from hpcmoe.config.key import config_key
from hpcmoe.config.schema import Config
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.planner.check import prepare
from hpcmoe.runs.create import ceiling_flag
from hpcmoe.runs.estimate import confirm, estimate_gpu_hours
from hpcmoe.runs.jobspec import job_shape


@dataclass(frozen=True)
class Point:
    """One point of the sweep, checked."""

    index: int  # in the multirun
    overrides: tuple[str, ...]
    composed: DictConfig  # with Hydra's own node
    config: Config
    gpu_hours: float | None  # an estimate
    shape: str  # hpcmoe.runs.jobspec.job_shape
    key: str  # hpcmoe.config.key


def compose_points(
    loader: ConfigLoader, master: DictConfig, job_overrides: Sequence[Sequence[str]], first_index: int
) -> list[Point]:
    """Every point of the sweep. Raises UserError for the first one that is no valid run."""
    setup_globals()
    outer = HydraConfig.instance().cfg
    try:
        return [_compose(loader, master, overrides, first_index + i) for i, overrides in enumerate(job_overrides)]
    finally:
        HydraConfig.instance().cfg = outer


def _compose(loader: ConfigLoader, master: DictConfig, overrides: Sequence[str], index: int) -> Point:
    composed = loader.load_sweep_config(master, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = str(index)
        composed.hydra.job.num = index
    HydraConfig.instance().set_config(composed)  # what ${hydra:...} in the config refers to
    words = tuple(filter_overrides(overrides))
    try:
        config = validate(to_config(composed))
        plan = prepare(config)
        speed = plan.tokens_per_s if plan is not None else None
        hours = estimate_gpu_hours(config, speed)
        ceiling_flag(config)
        shape = job_shape(config)  # what a job script cannot carry is found here, before anything is written
    except UserError as error:
        raise UserError(f"point {index} ({' '.join(words)}): {error}") from error
    return Point(index, words, composed, config, hours, shape, config_key(to_plain(config)))


def confirm_points(points: Sequence[Point], yes: bool) -> None:
    """Ask before a costly sweep: the points together, by the lowest bound that one of them sets. Raises UserError for a no."""
    bounds = [point.config.resilience.ask_above_gpu_hours for point in points]
    confirm([point.gpu_hours for point in points], min((bound for bound in bounds if bound is not None), default=None), yes)
