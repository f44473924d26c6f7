"""Where an attempt runs: what the batch shell's environment says of its job. Reads environment and files, asks nobody."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpcmoe.errors import UserError

ATTEMPT_ENV = "HPCMOE_ATTEMPT"


@dataclass(frozen=True)
class Place:
    """One start of a job script."""

    attempt: str  # "<job>.<restart>"
    job_id: str  # array tasks: "<array>_<task>"; local: "local-<pid>"
    restart: int
    nodes: int
    nodelist: str  # Slurm's host list expression; local: this host's name
    scheduler: str  # slurm | local


def this_place(environ: Mapping[str, str] = os.environ) -> Place:
    """The attempt this process belongs to. Raises UserError outside a job script of hpcmoe."""
    attempt = environ.get(ATTEMPT_ENV, "")
    job_id, dot, restart = attempt.rpartition(".")
    if not dot or not restart.isdigit():
        raise UserError(f"{ATTEMPT_ENV}={attempt!r} is not <job id>.<restart>; this command is started by hpcmoe's job script")
    local = job_id.startswith("local-")
    return Place(
        attempt=attempt,
        job_id=job_id,
        restart=int(restart),
        nodes=int(environ.get("SLURM_JOB_NUM_NODES") or 1),
        nodelist=os.uname().nodename if local else environ.get("SLURM_JOB_NODELIST", ""),
        scheduler="local" if local else "slurm",
    )


def local_pid(job_id: str) -> int:
    """The process id of a local job's script."""
    return int(job_id.removeprefix("local-"))


def process_start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (proc(5), field 22 of stat); None: there is none.

    Together with the pid this names a process for good: pids are used again, pairs are not.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
