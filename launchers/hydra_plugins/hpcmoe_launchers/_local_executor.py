"""submitit's local executor, which can also start a run: one job script that outlives this process and its terminal."""

from __future__ import annotations

import os
import shutil
import signal

from submitit.local.local import LocalExecutor

from hpcmoe.errors import UserError
from hpcmoe.runs.jobspec import JobSpec
from hpcmoe.runs.scripts import write_scripts
from hpcmoe.slurm.command import scrubbed

# What a parent may have set to be ignored would stay ignored in the script and its ranks.
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)


class HpcmoeLocalExecutor(LocalExecutor):
    """``submit``, ``map_array``, ... are submitit's own; ``submit_run`` starts runs of hpcmoe."""

    @classmethod
    def name(cls) -> str:
        return "hpcmoe_local"

    @classmethod
    def affinity(cls) -> int:
        return 0  # never submitit's automatic choice

    def submit_run(self, spec: JobSpec) -> list[str]:
        """Start the run's job script in a session of its own; its output goes to sbatch/local.log. Returns ``["local-PID"]``."""
        assert len(spec.run_dirs) == 1, "a local job carries one run; a sweep submits several, which take turns"
        bash = shutil.which("bash")
        if bash is None:
            raise UserError("cluster.scheduler=local needs bash, and there is none on PATH")
        write_scripts(spec)
        log = spec.script.parent / "local.log"
        pid = os.posix_spawn(
            bash,
            [bash, str(spec.script)],
            scrubbed(os.environ),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=_SIGNALS,
        )
        return [f"local-{pid}"]
