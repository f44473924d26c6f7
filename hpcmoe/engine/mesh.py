"""One world of ranks, seen twice: dense [pp, dp_replicate, dp_shard, tp] and experts [pp, dp_replicate, efsdp, ep].

Both are unflattened from one mesh, so that FSDP can join an expert's ep and efsdp axes. ep is innermost, inside a node, or, where
the layout places it across nodes, outside efsdp: then an expert's shards are in one node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcmoe.engine.launch import Launch
from hpcmoe.engine.support import Sizes
from hpcmoe.errors import UserError


@dataclass(frozen=True)
class Meshes:
    world: DeviceMesh
    dense: DeviceMesh
    experts: DeviceMesh

    def data(self) -> DeviceMesh:
        """Where dense parameters are sharded: dp_shard, with dp_replicate before it when there are replicas."""
        return self._with_replicas(self.dense, "dp_shard")

    def expert_data(self) -> DeviceMesh:
        return self._with_replicas(self.experts, "efsdp")

    @staticmethod
    def _with_replicas(mesh: DeviceMesh, axis: str) -> DeviceMesh:
        return mesh["dp_replicate", axis] if mesh["dp_replicate"].size() > 1 else mesh[axis]

    def data_rank(self) -> int:
        """This rank's place among the data-parallel ranks: which slice of the global batch it reads."""
        return (
            self.dense["dp_replicate"].get_local_rank() * self.dense["dp_shard"].size() + self.dense["dp_shard"].get_local_rank()
        )


def pick_device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("cluster.device=cuda, but this rank sees no GPU; use a CPU profile such as cluster=local, or check gres")
    visible = torch.cuda.device_count()
    index = local_rank if visible > 1 else 0  # srun may bind each rank to one GPU
    if index >= visible:
        raise UserError(f"local rank {local_rank} has no GPU: {visible} are visible on this node")
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


def build_meshes(sizes: Sizes, device: torch.device) -> Meshes:
    world = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("world",))
    dense = world._unflatten(
        0, (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.tp), ("pp", "dp_replicate", "dp_shard", "tp")
    )
    if sizes.ep_placement == "inside":
        shape, names = (sizes.efsdp, sizes.ep), ("efsdp", "ep")
    else:
        shape, names = (sizes.ep, sizes.efsdp), ("ep", "efsdp")
    experts = world._unflatten(0, (sizes.pp, sizes.dp_replicate, *shape), ("pp", "dp_replicate", *names))
    return Meshes(world, dense, experts)


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
