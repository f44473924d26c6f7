"""A batch of a Hydra app's points: made runs with ``engine=command``, submitted, and waited for."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hpcmoe.config.freeze import to_plain
from hpcmoe.config.key import config_key
from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.planner.check import prepare
from hpcmoe.runs.create import ceiling_flag
from hpcmoe.runs.estimate import estimate_gpu_hours, estimate_hours
from hpcmoe.runs.jobspec import job_shape
from hpcmoe.runs.observe import RunView
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.supervise import supervise_all
from hpcmoe.runs.sweep import SweepDir
from hydra_plugins.hpcmoe_launchers._app_config import app_config
from hydra_plugins.hpcmoe_launchers._payload import read_return, write_task
from hydra_plugins.hpcmoe_launchers._points import Point, confirm_points
from hydra_plugins.hpcmoe_launchers._sweep import Multirun, submit_points

log = logging.getLogger(__name__)

INTERRUPTED = 130
# Their sweepers go by what the task returns.
NEED_VALUES = ("hydra_plugins.hydra_optuna_sweeper.", "hydra_plugins.hydra_ax_sweeper.", "hydra_plugins.hydra_nevergrad_sweeper.")


class PointFailed(RuntimeError):  # noqa: N818  no error of this program's
    """A point's run ended without the task's own exception: killed, out of memory, cancelled, over its time limit."""


class AppSweep:
    """One launcher's sweep, from its first batch to its last."""

    def __init__(
        self,
        scheduler: str,
        params: Mapping[str, Any],
        config: DictConfig,
        context: HydraContext,
        function: TaskFunction,
    ) -> None:
        self.scheduler, self.params, self.config = scheduler, params, config
        self.context, self.function = context, function
        self.multirun = Multirun(f"hpcmoe_{scheduler}")
        self.task_file: Path | None = None  # once it is written

    def launch(self, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[JobReturn]:
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        detach = bool(self.params.get("detach"))
        sweeper = str(OmegaConf.select(self.config, "hydra.sweeper._target_"))
        if detach and sweeper.startswith(NEED_VALUES):
            raise UserError(f"hydra.launcher.detach=true: {sweeper} goes by the task's return values, and has to wait for them")
        directory = Path(str(self.config.hydra.sweep.dir)).absolute()
        task_file = self.task_file or _free_task_file(directory)
        points = self._points(job_overrides, first_index, task_file)
        confirm_points(points, bool(self.params.get("yes")))
        self._make_directory(directory)
        if self.task_file is None:
            # each point's process composes once, with Hydra's own loader
            plain = ConfigLoaderImpl(self.context.config_loader.get_search_path())
            write_task(task_file, self.function, HydraContext(plain, self.context.callbacks), self.config)
            self.task_file = task_file
        submitted = submit_points(points, self.config, multirun=self.multirun)
        sweep_id = SweepDir(directory).sweep_id
        log.info(f"Sweep {sweep_id}: {len(points)} points submitted; `hpcmoe sweep status {sweep_id}` follows them")
        for point in points:
            log.info(f"\t#{point.index} : {' '.join(point.overrides)}")
        return submitted if detach else self._wait(points, submitted, sweep_id)

    def _points(self, job_overrides: Sequence[Sequence[str]], first_index: int, task_file: Path) -> list[Point]:
        """All differ in the command's words alone, so they are checked once."""
        start = [sys.executable, "-m", "hydra_plugins.hpcmoe_launchers._run_point", str(task_file)]
        config = app_config(self.scheduler, self.params, start)
        # Another time the same command may be another code, and a sweeper that asks twice means it.
        config.sweep.skip_finished = False
        prepare(config)
        ceiling_flag(config)
        shape, gpu_hours, hours = job_shape(config), estimate_gpu_hours(config, None), estimate_hours(config, None)
        points = []
        for index, overrides in enumerate(job_overrides, first_index):
            own = _with_command(config, [*start, str(index), *overrides])
            words = tuple(filter_overrides(overrides))
            points.append(Point(index, words, None, own, gpu_hours, shape, config_key(to_plain(own)), hours))
        return points

    def _make_directory(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        mode = OmegaConf.select(self.config, "hydra.sweep.mode")
        if mode is not None:
            os.chmod(directory, int(str(mode), 8))

    def _wait(self, points: Sequence[Point], submitted: Sequence[JobReturn], sweep_id: str) -> list[JobReturn]:
        runs = [RunDir(Path(done.return_value["run_dir"])) for done in submitted]
        try:
            views = supervise_all(runs, log.debug, sweep=SweepDir(Path(str(self.config.hydra.sweep.dir)).absolute()))
        except KeyboardInterrupt:
            again = f"`hpcmoe sweep wait {sweep_id}` follows them again, `hpcmoe sweep cancel {sweep_id}` ends them"
            print(f"\nthe points of sweep {sweep_id} go on; {again}", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        returns = [self._return(point, view) for point, view in zip(points, views, strict=True)]
        failed = [done for done in returns if done.status is not JobStatus.COMPLETED]
        for point, view, done in zip(points, views, returns, strict=True):
            if done.status is not JobStatus.COMPLETED:
                what = f"#{point.index} ({' '.join(point.overrides)})"
                log.error(f"{what}: run {view.record.run.run_id} is {view.state}: {_first_line(done._return_value)}")
        log.info(f"Sweep {sweep_id}: {len(returns) - len(failed)} of {len(returns)} points completed")
        return returns

    def _return(self, point: Point, view: RunView) -> JobReturn:
        """What the point's task returned or raised; where there is no such word, why its run ended."""
        run = view.record.run
        completed = view.state == "COMPLETED"
        last = view.record.attempts[-1].attempt if view.record.attempts and not completed else None
        try:
            done = read_return(run, last)
        except Exception as error:  # unpickling runs the app's own code
            done, problem = None, f"its result cannot be read: {type(error).__name__}: {error}"
        else:
            problem = "its task left no result" if completed else view.reason or "no reason is known"
        if done is not None and (done.status == JobStatus.COMPLETED) == completed:
            return done
        failed = JobReturn(overrides=list(point.overrides), status=JobStatus.FAILED, working_dir=str(run.path))
        failed.task_name = JobRuntime.instance().get("name")
        failed.return_value = PointFailed(
            f"point {point.index}: run {run.run_id} is {view.state}: {problem}; its files: {run.path}"
        )
        return failed


def _free_task_file(directory: Path) -> Path:
    number = 0
    while (path := directory / "task" / f"{number}.pickle").exists():
        number += 1
    return path


def _with_command(config: Config, words: list[str]) -> Config:
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, command=words))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
