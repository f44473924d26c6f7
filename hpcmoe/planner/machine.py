"""The machine as the time and memory models see it: numbers of one GPU and one node. Built from a cluster profile."""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.config.cluster_schema import ClusterConfig


@dataclass(frozen=True)
class Machine:
    """``peak``: dense TFLOP/s by precision, None where the GPU has no such units. Bandwidths in bytes/s, one direction."""

    name: str
    gpu: str
    gpus_per_node: int
    mem_bytes: float | None
    peak: dict[str, float | None]
    hbm: float | None
    nvlink: float | None  # one GPU to the others of its node
    network_node: float | None  # one node to the others
    nodes: int | None = None
    cell_nodes: int | None = None
    cpu: bool = False

    @property
    def network_gpu(self) -> float | None:
        """A GPU's share of the node's network when all of them talk."""
        return None if self.network_node is None else self.network_node / self.gpus_per_node

    @property
    def known(self) -> bool:
        """Is there enough to say how fast something is?"""
        return bool(self.peak.get("bf16")) and None not in (self.hbm, self.nvlink, self.network_node)


def from_cluster(cluster: ClusterConfig, gpus_per_node: int) -> Machine:
    """The profile's figures; 1 GB/s is 1e9 bytes/s, 1 GiB is 2**30 bytes."""
    gpu, link = cluster.gpu, cluster.link
    return Machine(
        name=cluster.name,
        gpu=gpu.model,
        gpus_per_node=gpus_per_node,
        mem_bytes=None if gpu.mem_gib is None else gpu.mem_gib * 2**30,
        peak=dict(gpu.peak_tflops),
        hbm=None if gpu.hbm_gb_s is None else gpu.hbm_gb_s * 1e9,
        nvlink=None if link.intra_node_gb_s_per_gpu is None else link.intra_node_gb_s_per_gpu * 1e9,
        network_node=None if link.inter_node_gb_s_per_node is None else link.inter_node_gb_s_per_node * 1e9,
        nodes=cluster.nodes,
        cell_nodes=link.cell_nodes,
        cpu=cluster.device == "cpu",
    )
