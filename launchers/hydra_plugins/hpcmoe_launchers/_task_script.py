"""The job script of a pickled callable, from submitit's parameter names. Pure. Not for runs: hpcmoe.runs.jobspec."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.core.utils import JobPaths

from hpcmoe.runs.jobspec import fill_template
from hpcmoe.slurm.directives import directive

# Parameters of submitit's that are no flags of sbatch.
_OURS = frozenset(
    {"array_parallelism", "additional_parameters", "map_count", "setup", "teardown", "signal_delay_s", "stderr_to_stdout"}
    | {"srun_args", "use_srun"}
)
DEFAULT_TIME_MIN = 5
DEFAULT_SIGNAL_DELAY_S = 90
DEFAULT_ARRAY_PARALLELISM = 256


def task_script(command: str, folder: Path, parameters: Mapping[str, Any]) -> str:
    """``command``: a shell command that runs the callable in each task; ``parameters``: in submitit's words."""
    given = {name: value for name, value in parameters.items() if value is not None}
    count = given.get("map_count")
    job = "%A_%a" if count else "%j"
    paths = JobPaths(folder)
    out, err = (str(path).replace("%j", job) for path in (paths.stdout, paths.stderr))
    merged = bool(given.get("stderr_to_stdout"))
    words: dict[str, Any] = {
        "job_name": "submitit",
        "time": DEFAULT_TIME_MIN,
        "nodes": 1,
        "open_mode": "append",
        "export": "ALL",
        "output": out.replace("%t", "0"),
        "signal": f"USR2@{given.get('signal_delay_s', DEFAULT_SIGNAL_DELAY_S)}",
        **({} if merged else {"error": err.replace("%t", "0")}),
        **({"array": f"0-{count - 1}%{given.get('array_parallelism', DEFAULT_ARRAY_PARALLELISM)}"} if count else {}),
        **{name: value for name, value in given.items() if name not in _OURS},
        **given.get("additional_parameters", {}),
    }
    flags = ["--kill-on-bad-exit=1", "--export=ALL", "--unbuffered", "--open-mode=append", f"--output={out}"]
    flags += [] if merged else [f"--error={err}"]
    flags += [f"--cpus-per-task={words['cpus_per_task']}"] if "cpus_per_task" in words else []
    flags += list(given.get("srun_args", ()))
    return fill_template(
        "task.sh.j2",
        {
            "directives": [_line(name, words[name]) for name in sorted(words) if words[name] is not False],
            "setup": given.get("setup", []),
            "teardown": given.get("teardown", []),
            "srun_flags": [shlex.quote(flag) for flag in flags] if given.get("use_srun", True) else None,
            "command": command,
        },
    )


def _line(name: str, value: Any) -> str:
    return directive(name.replace("_", "-"), None if value is True else str(value))
