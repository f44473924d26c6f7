"""How ranks find each other, see that they are where the layout wants them, and part. Not their order (hpcmoe.engine.mesh)."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcmoe.engine.launch import Launch
from hpcmoe.engine.support import Sizes
from hpcmoe.errors import UserError

FAREWELL_S = 10.0  # how long the rank that keeps the store waits for the others to have read it


class NoDeviceError(UserError):
    """This rank has no GPU: the user's mistake, or a broken node."""


def pick_device(kind: str, local_rank: int) -> torch.device:
    """The rank's device. Raises NoDeviceError."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "cluster.device=cuda, but this rank sees no GPU; use a CPU profile such as cluster=local, or check gres"
        )
    visible = torch.cuda.device_count()
    index = local_rank if visible > 1 else 0  # srun may bind each rank to one GPU
    if index >= visible:
        raise NoDeviceError(f"local rank {local_rank} has no GPU: {visible} are visible on this node")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join_world(launch: Launch, device: torch.device, rendezvous_s: float = 600.0, collective_s: float = 1800.0) -> None:
    """Meet the other ranks within ``rendezvous_s``; a clear error when they do not come. ``collective_s``: for each operation."""
    os.environ.setdefault("MASTER_ADDR", launch.master_addr)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if launch.world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        try:
            store = dist.TCPStore(
                launch.master_addr,
                launch.master_port,
                launch.world_size,
                is_master=launch.rank == 0,
                timeout=timedelta(seconds=rendezvous_s),
            )
        except dist.DistStoreError as error:
            raise RuntimeError(
                f"rank {launch.rank} of {launch.world_size} did not meet the others at {launch.master_addr}:{launch.master_port} "
                f"within {rendezvous_s:g} s (resilience.rendezvous_timeout_s)"
            ) from error
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=collective_s),
        device_id=device if device.type == "cuda" else None,
    )


def leave_world(name: str = "end") -> None:
    """Return when all ranks are here; they may exit then. ``name``: of this meeting, once in a process group.

    By the store and not by a barrier: a rank that has left a barrier closes connections in which others still read.
    """
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    if store.add(f"{name}/here", 1) == ranks:
        store.set(f"{name}/all", "here")
    store.wait([f"{name}/all"])
    if rank != 0:
        store.add(f"{name}/gone", 1)
        return
    deadline = time.monotonic() + FAREWELL_S
    while store.add(f"{name}/gone", 0) < ranks - 1 and time.monotonic() < deadline:
        time.sleep(0.01)


def misplaced(sizes: Sizes, hosts: list[str]) -> str | None:
    """Why these hosts, one a rank in rank order, do not hold the layout as planned; None when they do.

    tp must lie in one host; ep too where it is placed inside; with as many ranks on every host, consecutive ranks make that so.
    """
    inside = sizes.ep_placement == "inside"
    node = max(hosts.count(host) for host in hosts)
    groups = [("tp", sizes.tp)] + ([("ep", sizes.ep)] if inside and sizes.ep <= node else [])
    for axis, size in groups:
        for first in range(0, len(hosts), size):
            found = sorted(set(hosts[first : first + size]))
            if len(found) > 1:
                placed = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
                return (
                    f"layout.{axis}={size} must lie inside a node, but ranks {first} to {first + size - 1} are on "
                    f"{', '.join(found)}; Slurm placed {placed}"
                )
    return None


def check_placement(sizes: Sizes) -> None:
    """Ranks must be where the layout wants them: tp over a network would be ten times slower, and nobody would know why."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    problem = misplaced(sizes, hosts)
    if problem is not None:
        raise UserError(problem)
