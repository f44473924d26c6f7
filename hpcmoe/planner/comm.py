"""Seconds of collectives on a two-level machine: NVLink inside a node, a shared network between nodes. No overlap here.

A group with r ranks in a node can use r GPUs' shares of the node's network, since all groups of a job talk at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.planner.constants import Constants
from hpcmoe.planner.machine import Machine

LATENCY_NODE = 8e-6  # seconds a collective takes at zero bytes inside a node, and per further node below
LATENCY_NETWORK = 4e-6


@dataclass(frozen=True)
class Wires:
    """Reached bandwidths of one GPU, bytes/s."""

    inside: float
    outside: float
    gpus_per_node: int


def wires(machine: Machine, c: Constants) -> Wires:
    assert machine.nvlink is not None, "Machine.known was not asked"
    assert machine.network_gpu is not None, "Machine.known was not asked"
    return Wires(machine.nvlink * c.nvlink, machine.network_gpu * c.network, machine.gpus_per_node)


def in_node(size: int, stride: int, gpus_per_node: int) -> int:
    """Ranks of a group that share a node; ``stride`` is the distance between neighbours in the rank order."""
    return max(1, min(size, gpus_per_node // stride if stride < gpus_per_node else 1))


def ring(size_bytes: float, ranks: int, stride: int, w: Wires, calls: int = 1) -> float:
    """All-gather or reduce-scatter of ``size_bytes`` (whole) over ``ranks`` in ``calls`` pieces: ``S (n-1)/n / bandwidth``.

    Each call also waits for a round over the group's nodes.
    """
    if ranks <= 1:
        return 0.0
    local = in_node(ranks, stride, w.gpus_per_node)
    if local == ranks:
        return size_bytes * (ranks - 1) / ranks / w.inside + calls * LATENCY_NODE
    bandwidth = min(w.inside, w.outside * local)
    return size_bytes * (ranks - 1) / ranks / bandwidth + calls * (LATENCY_NODE + LATENCY_NETWORK * (ranks // local))


def all_to_all(size_bytes: float, ranks: int, w: Wires, distinct_nodes: float | None = None, stride: int = 1) -> float:
    """Each rank sends ``size_bytes`` spread evenly over ``ranks``, ``stride`` apart; the two levels run at the same time.

    ``distinct_nodes``: with deduplication, the copies that travel for each one of the network's, as a factor below one.
    """
    if ranks <= 1:
        return 0.0
    local = in_node(ranks, stride, w.gpus_per_node)
    inside = size_bytes * (local - 1) / ranks / w.inside
    outside = size_bytes * (ranks - local) / ranks / w.outside * (distinct_nodes or 1.0)
    return max(inside, outside) + LATENCY_NODE + LATENCY_NETWORK * (ranks // local - 1)


def dedup_factor(ranks: int, top_k: int, gpus_per_node: int) -> float:
    """Copies of a token that cross the network when each node gets one, over the copies without: ``N(1-(1-1/N)^k) / k``."""
    nodes = max(1, ranks // gpus_per_node)
    return nodes * (1 - (1 - 1 / nodes) ** top_k) / top_k


def wire_ceiling(
    moe_layers: int, hidden: int, top_k: int, ep: int, machine: Machine, dedup: float = 1.0, stride: int = 1
) -> float | None:
    """Tokens/s/GPU that the network cannot exceed: four 16-bit transfers a MoE layer (dispatch and combine, both passes)."""
    local = in_node(ep, stride, machine.gpus_per_node)
    if machine.network_gpu is None or ep <= local or not moe_layers:
        return None
    outside = (ep - local) / ep
    return machine.network_gpu / (4 * 2 * moe_layers * hidden * top_k * outside * dedup)
