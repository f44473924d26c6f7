"""Writes docs/clusters/NAME.md and the table in docs/clusters.md from the profiles in conf/cluster/. A test keeps them equal.

python docs/make_clusters.py
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from hpcmoe.config.cluster_schema import ClusterConfig, QosConfig  # noqa: E402
from hpcmoe.config.compose import load  # noqa: E402
from hpcmoe.config.schema import Config  # noqa: E402
from hpcmoe.planner.provenance import source_of, unverified  # noqa: E402
from hpcmoe.resources import resource_dir  # noqa: E402

BEGIN, END = "<!-- made by make_clusters.py -->\n", "<!-- end -->\n"
FIGURES = {  # path in the profile: what a person calls it, and its unit
    "nodes": ("nodes of the machine", ""),
    "cpus_per_node": ("CPU cores a node", ""),
    "ram_gib": ("memory a node", "GiB"),
    "gpu.mem_gib": ("memory a GPU", "GiB"),
    "gpu.peak_tflops.bf16": ("dense bf16 peak a GPU", "TFLOP/s"),
    "gpu.peak_tflops.fp8": ("dense fp8 peak a GPU", "TFLOP/s"),
    "gpu.peak_tflops.fp32": ("fp32 peak a GPU", "TFLOP/s"),
    "gpu.hbm_gb_s": ("memory bandwidth a GPU", "GB/s"),
    "link.intra_node_gb_s_per_gpu": ("GPU to the others of its node, one way", "GB/s"),
    "link.inter_node_gb_s_per_node": ("node to other nodes, one way", "GB/s"),
    "link.topology": ("network", ""),
    "link.cell_nodes": ("nodes in one cell of the network", ""),
}


def names() -> list[str]:
    return sorted(path.stem for path in (resource_dir("conf") / "cluster").glob("*.yaml"))


def value_of(cluster: ClusterConfig, path: str) -> object:
    value: object = cluster
    for word in path.split("."):
        value = value.get(word) if isinstance(value, dict) else getattr(value, word)
    return value


def opening(name: str) -> str:
    """The comment on top of the profile: what a user has to set."""
    lines = (resource_dir("conf") / "cluster" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line)


def limits(name: str, rule: QosConfig) -> str:
    """A queue's limits, each in the unit in which the site states it."""
    nodes = (
        f"{rule.min_nodes or 1} to {rule.max_nodes}" if rule.max_nodes else f"{rule.min_nodes} or more" if rule.min_nodes else ""
    )
    words = [
        f"`{name}`",
        f"`--{rule.kind}`" + (" (Slurm's default)" if rule.default else ""),
        rule.partition or ("" if rule.kind == "qos" else name),
        nodes,
        str(rule.max_cores or ""),
        f"{rule.max_node_minutes:g}" if rule.max_node_minutes else "",
        rule.max_time or "",
        rule.rule or "",
    ]
    return "| " + " | ".join(words) + " |"


def figures(cluster: ClusterConfig) -> list[str]:
    rows = []
    for path, (words, unit) in FIGURES.items():
        value = value_of(cluster, path)
        if value is not None:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            source = source_of(cluster, path) or "not stated"
            rows.append(f"| {words} | {shown}{' ' + unit if unit else ''} | {source} |")
    return rows


def submit_line(name: str, config: Config) -> str:
    if name == "local":
        return "hpcmoe submit model=tiny cluster=local"
    words = [f"hpcmoe submit model={'tiny' if config.cluster.device == 'cpu' else 'mixtral_8x7b'} cluster={name} nodes=4"]
    if config.cluster.account_required:
        words.append("slurm.account=ACCOUNT")
    return " ".join(words)


def quirks(config: Config) -> list[str]:
    cluster, slurm, out = config.cluster, config.slurm, []
    if cluster.account_required:
        out.append("every job needs `slurm.account`")
    if not cluster.gres and cluster.scheduler == "slurm":
        out.append("nodes are given whole: no `--gres` is asked for")
    if slurm.exclusive:
        out.append("jobs ask for whole nodes (`slurm.exclusive`)")
    if cluster.master_addr:
        out.append(f"ranks meet at `{cluster.master_addr}`")
    out += [f"before the ranks start: `{line}`" for line in cluster.setup]
    if cluster.env:
        out.append("ranks get " + ", ".join(f"`{key}={value}`" for key, value in cluster.env.items()))
    return out + list(cluster.notes)


def page(name: str) -> str:
    config = load([f"cluster={name}"])
    cluster = config.cluster
    lines = [f"# {name}" + (f": {cluster.site}" if cluster.site else ""), "", opening(name), ""]
    lines += [f"A node has {config.gpus_per_node} x {cluster.gpu.model}" + ("." if cluster.device == "cuda" else " slots."), ""]
    rows = figures(cluster)
    if rows:
        lines += ["| figure | value | source |", "|---|---|---|", *rows, ""]
    if cluster.qos:
        lines += ["## Queues", "", "In order of preference; what a field leaves empty is not limited, or not on record.", ""]
        lines += [
            "| name | given as | partition | nodes | cores | node-minutes | time | rule |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [limits(queue, rule) for queue, rule in cluster.qos.items()]
        lines += ["", f"Source: {source_of(cluster, 'qos') or 'each in the profile'}.", ""]
    lines += ["## Submit", "", f"    {submit_line(name, config)}", ""]
    if quirks(config):
        lines += ["## Worth knowing", "", *(f"* {text}" for text in quirks(config)), ""]
    unread = unverified(cluster) if cluster.sources or cluster.unverified else []
    if unread:
        lines += ["## Without a read source", "", ", ".join(f"`{path}`" for path in unread), ""]
    lines += [
        f"Made from [conf/cluster/{name}.yaml](../../conf/cluster/{name}.yaml) by docs/make_clusters.py; change the profile."
    ]
    return "\n".join(lines) + "\n"


def table() -> str:
    lines = ["| cluster | site | nodes | GPUs a node | GiB a GPU | peak bf16 / fp8 | NVLink GB/s a GPU | network GB/s a node |"]
    lines.append("|---|---|---|---|---|---|---|---|")

    def cell(cluster: ClusterConfig, path: str) -> str:
        value = value_of(cluster, path)
        if value is None:
            return "none" if path.endswith("fp8") and cluster.gpu.peak_tflops else "-"
        return f"{value:g}" + ("*" if source_of(cluster, path) in (None, "unverified") else "")

    for name in names():
        config = load([f"cluster={name}"])
        c = config.cluster
        peaks = f"{cell(c, 'gpu.peak_tflops.bf16')} / {cell(c, 'gpu.peak_tflops.fp8')}"
        cells = [f"[`{name}`](clusters/{name}.md)", c.site or "-", cell(c, "nodes"), f"{config.gpus_per_node} x {c.gpu.model}"]
        cells += [
            cell(c, "gpu.mem_gib"),
            peaks,
            cell(c, "link.intra_node_gb_s_per_gpu"),
            cell(c, "link.inter_node_gb_s_per_node"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(index: str) -> str:
    """``index`` with the table between its marks made anew."""
    before, _, rest = index.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def main() -> None:
    for name in names():
        (DOCS / "clusters" / f"{name}.md").write_text(page(name), encoding="utf-8")
    index = DOCS / "clusters.md"
    index.write_text(with_table(index.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
