"""A machine's profile: node shape, GPU, links, partitions and their rules, environment. Facts only; decisions are the planner's.

``sources`` keeps where each figure comes from; a figure without a source is listed in ``unverified`` and printed as such.
"""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class GpuConfig:
    """One GPU; on a CPU cluster, one slot."""

    model: str = "cpu"
    mem_gib: float | None = None
    # Dense, by precision (bf16, fp8, fp32); null: not supported.
    peak_tflops: dict[str, float | None] = field(default_factory=dict)
    hbm_gb_s: float | None = None  # GB/s = 1e9 bytes/s


@dataclass
class LinkConfig:
    """Bandwidths per direction, GB/s = 1e9 bytes/s."""

    intra_node_gb_s_per_gpu: float | None = None
    inter_node_gb_s_per_node: float | None = None
    topology: str | None = None
    cell_nodes: int | None = None  # nodes that share the first level of the network


@dataclass
class QosConfig:
    """A QOS or partition limit, in its own units; null: none, or not known (see ``unverified``). Listed by preference."""

    kind: str = "qos"  # qos | partition: is its name a --qos or a --partition?
    partition: str | None = None  # where this QOS is used; null: any
    default: bool = False  # what Slurm uses when no QOS is named
    min_nodes: int | None = None
    max_nodes: int | None = None
    max_cores: int | None = None
    max_node_minutes: float | None = None
    max_time: str | None = None
    default_time: str | None = None
    priority: int | None = None
    rule: str | None = None  # what the site says, in words


@dataclass
class ClusterConfig:
    """The machine as a whole. A null is unknown, never zero."""

    name: str = MISSING
    site: str | None = None
    scheduler: str = "slurm"  # slurm | local
    device: str = "cuda"  # cuda | cpu
    nodes: int | None = None  # the whole machine
    cpus_per_node: int | None = None
    ram_gib: float | None = None
    gpu: GpuConfig = field(default_factory=GpuConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    qos: dict[str, QosConfig] = field(default_factory=dict)
    account_required: bool = False
    gres: bool = True  # ask for GPUs with --gres=gpu:N
    master_addr: str | None = None  # how ranks reach the first node: "{host}", "{host}i"; null: its host name, resolved
    setup: list[str] = field(default_factory=list)  # shell lines before the ranks start: module load ...
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)  # field path -> source
    unverified: list[str] = field(default_factory=list)  # field paths without a read source
