"""``python -m hydra_plugins.hpcmoe_launchers._run_point TASK NUMBER OVERRIDE...``: one point of a Hydra app's multirun.

The command of a run with ``engine=command``. Composes the point's config and runs the task as Hydra's own launchers do. Started
again after a preemption it starts the task again (docs/hydra.md); a task that is done is not done twice.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from omegaconf import open_dict

from hpcmoe.runs.rundir import RunDir
from hydra_plugins.hpcmoe_launchers._payload import Task, TaskRaised, completed_in, read_task, write_return


def run_point(task: Task, number: int, overrides: Sequence[str], job_id: str) -> JobReturn:
    """What the task returned or raised, as a JobReturn."""
    Singleton.set_state(task.singletons)
    setup_globals()
    config = task.context.config_loader.load_sweep_config(task.config, list(overrides))
    with open_dict(config.hydra.job):
        config.hydra.job.id = job_id
        config.hydra.job.num = number
    return run_job(
        hydra_context=task.context,
        task_function=task.function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _attempt(path: Path, number: int, overrides: list[str], job_id: str) -> JobReturn:
    """Also for what ends a task outside Hydra's own ways: modules that are gone, a config that does not compose, sys.exit."""
    done = JobReturn(overrides=overrides, status=JobStatus.FAILED)
    try:
        return run_point(read_task(path), number, overrides, job_id)
    except SystemExit as left:
        if left.code in (None, 0):
            done.status = JobStatus.COMPLETED
        else:
            done.return_value = TaskRaised(f"the task left with sys.exit({left.code!r})")
    except Exception as error:
        done.return_value = error
    return done


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2 or not argv[1].isdigit():
        print(f"usage: python -m {__spec__.name if __spec__ else __name__} TASK NUMBER OVERRIDE...", file=sys.stderr)
        return 2
    run, attempt = RunDir(Path(os.environ["HPCMOE_RUN_DIR"])), os.environ["HPCMOE_ATTEMPT"]
    first = os.environ.get("RANK", "0") == "0"
    if completed_in(run) not in (None, attempt):
        print(f"hpcmoe: the task of run {run.run_id} is done already")
        return 0
    done = _attempt(Path(argv[0]), int(argv[1]), list(argv[2:]), attempt.rpartition(".")[0])
    raised = done._return_value
    if first:
        done = write_return(run, attempt, done)
    if done.status == JobStatus.COMPLETED:
        return 0
    error = raised if isinstance(raised, BaseException) else done._return_value
    traceback.print_exception(error)
    with Path(os.environ["HPCMOE_FATAL"]).open("w", encoding="utf-8") as file:
        file.write(f"{type(error).__name__}: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
