"""Which figures of a cluster profile have a read source, and which do not: what a plan must admit.

Not the figures themselves (cluster_schema) and not their use.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from hpcmoe.config.cluster_schema import ClusterConfig

_FIGURES = ("nodes", "cpus_per_node", "ram_gib", "gpu", "link", "qos")
_WORDS = ("model", "rule", "partition", "kind", "default")  # names, not figures


def figures(cluster: ClusterConfig) -> list[str]:
    """Dotted paths of every number (and topology) a profile states."""
    out: list[str] = []

    def walk(value: object, path: str) -> None:
        if value is None or path.rsplit(".", 1)[-1] in _WORDS:
            return
        if is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                walk(getattr(value, field.name), f"{path}.{field.name}")
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}")
        else:
            out.append(path)

    for name in _FIGURES:
        walk(getattr(cluster, name), name)
    return out


def _covers(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(prefix + ".")


def source_of(cluster: ClusterConfig, path: str) -> str | None:
    """Where a figure comes from; the longest matching entry wins. None: nobody says."""
    found = max((key for key in cluster.sources if _covers(key, path)), key=len, default=None)
    doubted = max((key for key in cluster.unverified if _covers(key, path)), key=len, default=None)
    if doubted is not None and (found is None or len(doubted) > len(found)):
        return "unverified"
    return cluster.sources[found] if found is not None else None


def unverified(cluster: ClusterConfig) -> list[str]:
    """Figures without a read source, in the profile's order."""
    return [path for path in figures(cluster) if source_of(cluster, path) in (None, "unverified")]
