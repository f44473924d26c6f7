"""``hydra/launcher=hpcmoe``: a Hydra multirun becomes runs of hpcmoe, submitted and left alone; nothing waits for them.

Not for any other Hydra app: each point must be a config of hpcmoe. Light at import, as Hydra imports it in every app.
"""

# No `from __future__ import annotations` here: Hydra executes plugins without registering them as modules, and dataclasses
# cannot look up annotations that are strings then.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class HpcmoeLauncherConf:
    _target_: str = "hydra_plugins.hpcmoe_launchers.launcher.HpcmoeLauncher"
    dry_run: bool = False  # compose and check every point, submit none
    yes: bool = False  # do not ask before a costly submission
    sweep: str | None = None  # the directory of a sweep to which the points are added; null: hydra.sweep.dir


ConfigStore.instance().store(group="hydra/launcher", name="hpcmoe", node=HpcmoeLauncherConf, provider="hpcmoe")


class HpcmoeLauncher(Launcher):
    """Composes every point and checks it before anything is written; then one Slurm array for each job shape."""

    def __init__(self, dry_run: bool = False, yes: bool = False, sweep: str | None = None) -> None:
        self.dry_run = dry_run
        self.sweep = sweep
        self.yes = yes
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None
        self.there: dict[str, str] | None = None  # runs that the sweep had before this multirun, by their key
        self.multirun: Any = None  # hydra_plugins.hpcmoe_launchers._sweep.Multirun, from the first batch on

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.hydra_context = hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """One JobReturn a point, COMPLETED when it is submitted; its value: that of ``submit_points``.

        In a dry run nothing is written or submitted, and the value is a Preview of the point.

        Raises UserError, before anything is written, when any point is no valid config of hpcmoe; it names all of these.
        """
        from pathlib import Path

        from hpcmoe.runs.sweep import SweepDir
        from hydra_plugins.hpcmoe_launchers._points import compose_points, confirm_points, not_run, runs_by_key, show_plan
        from hydra_plugins.hpcmoe_launchers._sweep import Multirun, preview_points, submit_points

        assert self.config is not None, "Hydra calls setup first"
        assert self.hydra_context is not None
        points = compose_points(self.hydra_context.config_loader, self.config, job_overrides, initial_job_idx)
        sweep = SweepDir(Path(self.sweep or str(self.config.hydra.sweep.dir)))
        if self.there is None:
            self.there = runs_by_key(sweep)
        known = not_run(points, self.there)
        if self.dry_run:
            return preview_points(points, known)
        show_plan(points, known)
        confirm_points([point for point in points if point.key not in known], self.yes)
        self.multirun = self.multirun or Multirun()
        return submit_points(points, self.config, multirun=self.multirun)
