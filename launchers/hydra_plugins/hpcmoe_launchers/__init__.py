"""What starts ranks and sweeps: submitit executors over our job scripts, and the Hydra launcher ``hydra/launcher=hpcmoe``.

Hydra imports every module here whose name has no leading underscore, at the start of every app: those stay light.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpcmoe.errors import UserError

if TYPE_CHECKING:
    from hpcmoe.config.schema import Config
    from hydra_plugins.hpcmoe_launchers._local_executor import HpcmoeLocalExecutor
    from hydra_plugins.hpcmoe_launchers._slurm_executor import HpcmoeSlurmExecutor


def executor_for(config: Config, folder: Path) -> HpcmoeSlurmExecutor | HpcmoeLocalExecutor:
    """The executor for the config's cluster. ``folder``: where submitit keeps its files for plain callables.

    Raises SlurmMissing when the cluster is a Slurm machine and this one is not.
    """
    match config.cluster.scheduler:
        case "slurm":
            from hydra_plugins.hpcmoe_launchers._slurm_executor import HpcmoeSlurmExecutor

            return HpcmoeSlurmExecutor(folder)
        case "local":
            from hydra_plugins.hpcmoe_launchers._local_executor import HpcmoeLocalExecutor

            return HpcmoeLocalExecutor(folder)
    raise UserError(f"cluster.scheduler={config.cluster.scheduler!r} is not a scheduler; valid: local, slurm")
