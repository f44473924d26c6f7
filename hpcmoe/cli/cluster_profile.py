"""A cluster profile from what Slurm says of itself, and where a profile and Slurm disagree. Pure; cli/doctor.py asks and writes.

Slurm knows counts and limits. What it does not know stays null and is listed in ``unverified``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcmoe.config.cluster_schema import ClusterConfig
from hpcmoe.slurm.parse import format_duration, parse_duration
from hpcmoe.slurm.probe import Finding
from hpcmoe.slurm.site import NodeShape, Qos, Site

USUAL_TIME_S = 86400.0
LEAST_RAM = 0.7  # Slurm counts what is left for jobs: a profile's RAM may be so much more
NOT_IN_SLURM = ("gpu.mem_gib", "gpu.peak_tflops", "gpu.hbm_gb_s", "link.intra_node_gb_s_per_gpu", "link.inter_node_gb_s_per_node")
TOPIC = "profile"


def main_shape(site: Site, partition: str | None) -> NodeShape | None:
    """The most frequent kind of node in the partition; with GPUs, if it has any."""
    shapes = [shape for shape in site.shapes if partition in (None, shape.partition)]
    return max(shapes, key=lambda shape: (shape.gpus > 0, shape.nodes), default=None)


def profile_of(site: Site, name: str, partition: str | None, today: str) -> dict[str, Any]:
    """The values of conf/cluster/NAME.yaml, for the partition that is named or is the default."""
    chosen = site.partition(partition)
    shape = main_shape(site, chosen.facts.name if chosen else None)
    gpus = shape.gpus if shape else 0
    limit = chosen.facts.max_time_s if chosen else None
    source = f"Slurm on {today}"
    known = ["nodes", "cpus_per_node", "ram_gib", "qos"] if shape else ["qos"]
    slurm: dict[str, Any] = {"partition": chosen.facts.name if chosen else None}
    slurm["time"] = format_duration(min(limit or USUAL_TIME_S, USUAL_TIME_S))
    if shape:
        slurm["cpus_per_task"] = max(1, shape.cpus // max(1, gpus))
    return {
        "nodes": 1,
        "gpus_per_node": max(1, gpus),
        "slurm": slurm,
        "cluster": {
            "name": name,
            "site": None,
            "scheduler": "slurm",
            "device": "cuda" if gpus else "cpu",
            "nodes": chosen.nodes if chosen else None,
            "cpus_per_node": shape.cpus if shape else None,
            "ram_gib": shape.mem_mb // 1024 if shape else None,
            "account_required": "associations" in site.config.get("AccountingStorageEnforce", ""),
            "gres": bool(gpus),
            "gpu": {
                "model": (shape.gpu_type if shape else None) or ("gpu" if gpus else "cpu"),
                "mem_gib": None,
                "hbm_gb_s": None,
            },
            "link": {"intra_node_gb_s_per_gpu": None, "inter_node_gb_s_per_node": None},
            "qos": {one.name: _qos(one, site) for one in _usable(site)},
            "setup": [],
            "notes": [
                "written by hpcmoe doctor; put your module lines into setup, and figures of GPU and links where null stands"
            ],
            "sources": dict.fromkeys(known, source),
            "unverified": list(NOT_IN_SLURM),
        },
    }


def _usable(site: Site) -> list[Qos]:
    mine = {name for one in site.accounts for name in one.qos}
    return sorted((one for one in site.qos if one.name in mine), key=lambda one: -one.priority)


def _qos(qos: Qos, site: Site) -> dict[str, Any]:
    limits = {
        "min_nodes": qos.min_nodes,
        "max_nodes": qos.max_nodes,
        "max_time": None if qos.max_time_s is None else format_duration(qos.max_time_s),
        "priority": qos.priority,
    }
    default = any(one.default_qos == qos.name or one.qos == (qos.name,) for one in site.accounts)
    return {**({"default": True} if default else {}), **{key: value for key, value in limits.items() if value is not None}}


def differences(cluster: ClusterConfig, gpus_per_node: int, partition: str | None, site: Site) -> Iterator[Finding]:
    """What the profile says and Slurm does not."""
    found = [*_shape_differences(cluster, gpus_per_node, partition, site), *_qos_differences(cluster, site)]
    yield from found
    if not found:
        yield Finding(TOPIC, "ok", f"{cluster.name}: nothing that Slurm says contradicts it")


def _shape_differences(cluster: ClusterConfig, gpus: int, partition: str | None, site: Site) -> Iterator[Finding]:
    chosen = site.partition(partition)
    shape = main_shape(site, chosen.facts.name if chosen else partition)
    if shape is None:
        yield Finding(TOPIC, "unknown", "Slurm shows no nodes of the partition, so their shape cannot be compared")
        return
    has = chosen.nodes if chosen else None
    pairs = [("cluster.nodes", cluster.nodes, has), ("cluster.cpus_per_node", cluster.cpus_per_node, shape.cpus)]
    if cluster.gres:
        pairs.append(("gpus_per_node", gpus, shape.gpus))
    for key, said, seen in pairs:
        if said is not None and seen is not None and said != seen:
            yield Finding(
                TOPIC, "warn", f"{key} is {said} in the profile, and {seen} in Slurm", f"set {key}={seen}, if Slurm is right"
            )
    ram = shape.mem_mb / 1024
    if cluster.ram_gib is not None and not LEAST_RAM * cluster.ram_gib <= ram <= cluster.ram_gib * 1.01:
        says = f"cluster.ram_gib is {cluster.ram_gib:g} in the profile, and Slurm gives jobs {ram:.0f} GiB"
        yield Finding(TOPIC, "warn", says, f"set cluster.ram_gib={ram:.0f}")


def _qos_differences(cluster: ClusterConfig, site: Site) -> Iterator[Finding]:
    partitions = {part.facts.name: part.facts for part in site.partitions}
    for name, rule in cluster.qos.items():
        if rule.kind == "partition":
            known, most_nodes, most_s = name in partitions, None, None
            if known:
                most_nodes, most_s = partitions[name].max_nodes, partitions[name].max_time_s
            blind = not partitions
        else:
            qos = site.qos_named(name)
            known, blind = qos is not None, not site.qos
            most_nodes, most_s = (qos.max_nodes, qos.max_time_s) if qos else (None, None)
        if blind:
            continue
        if not known:
            yield Finding(TOPIC, "warn", f"Slurm has no {rule.kind} {name!r}, which the profile names", f"~cluster.qos.{name}")
        if most_nodes is not None and rule.max_nodes is not None and most_nodes != rule.max_nodes:
            says = f"{name} takes {rule.max_nodes} nodes in the profile, and {most_nodes} in Slurm"
            yield Finding(TOPIC, "warn", says, f"set cluster.qos.{name}.max_nodes={most_nodes}")
        if most_s is not None and rule.max_time is not None and parse_duration(rule.max_time) != most_s:
            says = f"{name} runs {rule.max_time} in the profile, and {format_duration(most_s)} in Slurm"
            yield Finding(TOPIC, "warn", says, f"set cluster.qos.{name}.max_time={format_duration(most_s)}")
