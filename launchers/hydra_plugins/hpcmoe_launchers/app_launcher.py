"""``hydra/launcher=hpcmoe_slurm`` and ``hpcmoe_local``: a multirun of any Hydra app, each point a run of hpcmoe.

Keys are named as in hydra-submitit-launcher (docs/hydra.md says what differs). Not for hpcmoe's own configs: ``launcher.py``.
Light at import, as Hydra imports it in every app.
"""

# No `from __future__ import annotations` here: Hydra executes plugins without registering them as modules, and dataclasses
# cannot look up annotations that are strings then.
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

_HERE = "hydra_plugins.hpcmoe_launchers.app_launcher"


@dataclass
class AppLauncherConf:
    """What both launchers know."""

    submitit_folder: str | None = None  # taken and not used: a run has a directory of its own
    timeout_min: int = 60  # minutes; of a local run not kept
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int = 1
    mem_gb: int | None = None  # GB a node
    nodes: int = 1
    name: str = "${hydra.job.name}"
    stderr_to_stdout: bool = False  # taken: both are in one log anyway
    detach: bool = False  # submit and return at once, without the task's return values
    hpcmoe: dict[str, Any] = field(default_factory=dict)  # any other key of hpcmoe's own, such as resilience.max_gpu_hours
    yes: bool = False  # do not ask before a costly submission


@dataclass
class SlurmLauncherConf(AppLauncherConf):
    _target_: str = f"{_HERE}.HpcmoeSlurmLauncher"
    partition: str | None = None
    qos: str | None = None
    comment: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    gres: str | None = None
    cpus_per_gpu: int | None = None
    gpus_per_task: int | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    account: str | None = None
    signal_delay_s: int = 120  # seconds before the time limit at which the task is told to leave
    max_num_timeout: int = 0  # time limits after which the task starts again
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # any other flag of sbatch
    array_parallelism: int = 256  # points that run at once
    setup: list[str] | None = None  # shell lines before the task
    cluster: str | None = None  # a profile of hpcmoe's (conf/cluster), or a file: its environment and its queues' rules


@dataclass
class LocalLauncherConf(AppLauncherConf):
    _target_: str = f"{_HERE}.HpcmoeLocalLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="hpcmoe_slurm", node=SlurmLauncherConf, provider="hpcmoe")
ConfigStore.instance().store(group="hydra/launcher", name="hpcmoe_local", node=LocalLauncherConf, provider="hpcmoe")


class _AppLauncher(Launcher):
    """Submits the points of a batch as runs; then waits for all of them, or with ``detach`` does not."""

    scheduler = ""

    def __init__(self, **params: Any) -> None:
        self.params: dict[str, Any] = {
            name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for name, value in params.items()
        }
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None
        self.task_function: TaskFunction | None = None
        self.sweep: Any = None  # hydra_plugins.hpcmoe_launchers._app_sweep.AppSweep, from the first batch on

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl

        self.config = config
        self.hydra_context = hydra_context
        self.task_function = task_function
        if type(hydra_context.config_loader) is ConfigLoaderImpl:
            from hpcmoe.config.sweep_loader import SweepLoader

            # Hydra's sweepers compose each point to see that it can be; with this loader that takes a tenth of the time.
            hydra_context.config_loader = SweepLoader(hydra_context.config_loader.get_search_path())

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """One JobReturn a point, when all have ended: COMPLETED with the task's return value, or FAILED with its exception.

        With ``detach`` one each at once, COMPLETED, with that of ``submit_points`` as its value. Raises UserError, before
        anything is submitted, for settings that cannot be.
        """
        from hydra_plugins.hpcmoe_launchers._app_sweep import AppSweep

        assert self.config is not None, "Hydra calls setup first"
        assert self.hydra_context is not None
        assert self.task_function is not None
        if self.sweep is None:
            self.sweep = AppSweep(self.scheduler, self.params, self.config, self.hydra_context, self.task_function)
        returns: Sequence[JobReturn] = self.sweep.launch(job_overrides, initial_job_idx)
        return returns


class HpcmoeSlurmLauncher(_AppLauncher):
    scheduler = "slurm"


class HpcmoeLocalLauncher(_AppLauncher):
    scheduler = "local"
