"""One world of ranks, seen twice: dense [pp, dp_replicate, dp_shard, tp] and experts [pp, dp_replicate, efsdp, ep].

Both are unflattened from one mesh, so that FSDP can join an expert's ep and efsdp axes. ep is innermost, inside a node, or, where
the layout places it across nodes, outside efsdp: then an expert's shards are in one node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcmoe.engine.support import Sizes


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
