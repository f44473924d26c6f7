"""What the job script tells a rank: who it is, where the others meet, which run and attempt. Stdlib only.

Slurm's names are understood where torch's are not set. Not for process groups (hpcmoe.engine.world).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcmoe.errors import UserError


@dataclass(frozen=True)
class Launch:
    run_dir: Path
    attempt: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def read_launch(run_dir: Path, env: Mapping[str, str]) -> Launch:
    """The facts in ``env``; a lone process without them is a world of one. Raises UserError for half-given ones."""
    if "RANK" in env:
        rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_rank = _number(env, "LOCAL_RANK", rank)
        local_world = _number(env, "LOCAL_WORLD_SIZE", world)
    elif "SLURM_PROCID" in env:
        rank, world = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
        local_rank = _number(env, "SLURM_LOCALID")
        local_world = _first_tasks(env.get("SLURM_TASKS_PER_NODE", str(world)))
    else:
        rank, world, local_rank, local_world = 0, 1, 0, 1
    if world > 1 and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        raise UserError(f"rank {rank} of {world} was started without MASTER_ADDR and MASTER_PORT; the job script sets them")
    return Launch(
        run_dir=run_dir,
        attempt=env.get("HPCMOE_ATTEMPT", f"local-{os.getpid()}.0"),
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(env.get("MASTER_PORT", "0")),
    )


def _number(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = env.get(key)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d+", text):
        raise UserError(f"{key}={text!r} in this rank's environment is not a number")
    return int(text)


def _first_tasks(tasks_per_node: str) -> int:
    """Tasks of the first node in Slurm's form "4(x2),3"."""
    match = re.match(r"\d+", tasks_per_node)
    return int(match.group()) if match else 1


def check_world(launch: Launch, expected: int, local: int) -> None:
    """The ranks that were started must be those the run is laid out for; N worlds of one are caught here."""
    if launch.world_size != expected:
        raise UserError(
            f"{launch.world_size} ranks were started, but the run is laid out for {expected} (nodes x ranks of a node); "
            "nothing was trained"
        )
    if not 0 <= launch.rank < expected or not 0 <= launch.local_rank < launch.local_world_size:
        raise UserError(
            f"rank {launch.rank} (local {launch.local_rank} of {launch.local_world_size}) cannot be in a world of {expected}"
        )
    if launch.local_world_size > local:
        raise UserError(f"{launch.local_world_size} ranks on one node, where {local} were expected")
