"""What a site's Slurm is beyond one partition: all partitions, node shapes, QOS, a user's accounts. Reads only; judges nothing.

``ask_site`` asks; the rest is parsing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcmoe.slurm.command import SlurmError, run_or_reject
from hpcmoe.slurm.facts import ClusterFacts, PartitionFacts, partition_of, read_cluster
from hpcmoe.slurm.parse import SEPARATOR, parse_config, parse_duration, parse_records, parse_rows

NODE_COLUMNS = ("%R", "%D", "%c", "%m", "%G")
NODE_FORMAT = SEPARATOR.join(NODE_COLUMNS)
QOS_COLUMNS = ("Name", "Priority", "GraceTime", "PreemptMode", "Preempt", "MaxWall", "MaxTRES", "MaxTRESPU", "MinTRES")
ACCOUNT_COLUMNS = ("Account", "Partition", "QOS", "DefaultQOS")


@dataclass(frozen=True)
class Partition:
    """A partition's rules, who may use it, and who preempts whom by its tier."""

    facts: PartitionFacts
    default: bool
    tier: int
    nodes: int | None
    accounts: tuple[str, ...]  # that may use it; empty: all
    qos: tuple[str, ...]  # likewise
    own_qos: str | None  # whose limits hold for all of its jobs


@dataclass(frozen=True)
class NodeShape:
    """Nodes of one kind in one partition, as Slurm counts them."""

    partition: str
    nodes: int
    cpus: int
    mem_mb: int
    gpus: int
    gpu_type: str | None


@dataclass(frozen=True)
class Qos:
    """A QOS. None: no limit, or not set."""

    name: str
    priority: int
    grace_s: float
    preempt_mode: str  # "cluster": the cluster's
    preempts: tuple[str, ...]
    max_time_s: float | None
    max_nodes: int | None  # of one job, or of one user, whichever is less
    min_nodes: int | None


@dataclass(frozen=True)
class Account:
    """One association of the user's."""

    account: str
    partition: str | None
    qos: tuple[str, ...]
    default_qos: str | None


@dataclass(frozen=True)
class Site:
    """All that could be asked. ``silent``: what could not, by question, with the reason."""

    cluster: ClusterFacts
    config: Mapping[str, str]  # the lines of `scontrol show config`
    partitions: tuple[Partition, ...] = ()
    shapes: tuple[NodeShape, ...] = ()
    qos: tuple[Qos, ...] = ()
    accounts: tuple[Account, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)

    def partition(self, name: str | None) -> Partition | None:
        """The named one; the site's default without a name."""
        found = [part for part in self.partitions if (part.default if name is None else part.facts.name == name)]
        return found[0] if found else None

    def qos_named(self, name: str | None) -> Qos | None:
        return next((one for one in self.qos if one.name == name), None)


def read_partitions(text: str) -> tuple[Partition, ...]:
    """From ``scontrol show partition``."""
    return tuple(_partition(record) for record in parse_records(text) if "PartitionName" in record)


def _partition(record: Mapping[str, str]) -> Partition:
    own = record.get("QoS", "N/A")
    return Partition(
        facts=partition_of(record),
        default=record.get("Default") == "YES",
        tier=int(record.get("PriorityTier", "1") or 1),
        nodes=_number(record.get("TotalNodes", "")),
        accounts=_names(record.get("AllowAccounts", "ALL")),
        qos=_names(record.get("AllowQos", "ALL")),
        own_qos=None if own in ("N/A", "", "(null)") else own,
    )


def _names(text: str) -> tuple[str, ...]:
    return () if text in ("", "ALL", "(null)") else tuple(text.split(","))


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def read_shapes(text: str) -> tuple[NodeShape, ...]:
    """From ``sinfo -h -o NODE_FORMAT``. ``+`` behind a number: some nodes of the group have more."""
    shapes = []
    for partition, nodes, cpus, memory, gres in parse_rows(text, len(NODE_COLUMNS)):
        gpus, kind = gpus_of_gres(gres)
        shapes.append(NodeShape(partition, int(nodes), int(cpus.rstrip("+")), int(memory.rstrip("+")), gpus, kind))
    return tuple(shapes)


def gpus_of_gres(text: str) -> tuple[int, str | None]:
    """``gpu:a100:4(S:0-1),nvme:1`` -> 4 and a100; the first kind where there are several."""
    count, kind = 0, None
    for entry in text.split(","):
        parts = entry.partition("(")[0].split(":")
        if parts[0] != "gpu":
            continue
        number = parts[-1]
        count += int(number) if number.isdigit() else 1
        if kind is None and len(parts) > 1 and not parts[1].isdigit():
            kind = parts[1]
    return count, kind


def read_qos(text: str) -> tuple[Qos, ...]:
    """From ``sacctmgr -n -P show qos format=QOS_COLUMNS``."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(_qos(row) for row in rows if len(row) == len(QOS_COLUMNS) and row[0])


def _qos(row: list[str]) -> Qos:
    name, priority, grace, mode, preempts, wall, job_tres, user_tres, min_tres = row
    most = [number for number in (_nodes_in(job_tres), _nodes_in(user_tres)) if number is not None]
    return Qos(
        name=name,
        priority=_number(priority) or 0,
        grace_s=parse_duration(grace) or 0.0,
        preempt_mode=mode or "cluster",
        preempts=tuple(filter(None, preempts.split(","))),
        max_time_s=parse_duration(wall),
        max_nodes=min(most, default=None),
        min_nodes=_nodes_in(min_tres),
    )


def _nodes_in(tres: str) -> int | None:
    return _number(dict(entry.partition("=")[::2] for entry in tres.split(",")).get("node", ""))


def read_accounts(text: str) -> tuple[Account, ...]:
    """From ``sacctmgr -n -P show assoc user=NAME format=ACCOUNT_COLUMNS``."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(
        Account(row[0], row[1] or None, tuple(filter(None, row[2].split(","))), row[3] or None)
        for row in rows
        if len(row) == len(ACCOUNT_COLUMNS) and row[0]
    )


def ask_site(user: str) -> Site:
    """Everything about this Slurm that ``user`` may read. Raises SlurmError only when its own configuration cannot be had."""
    text = run_or_reject(["scontrol", "show", "config"])
    silent: dict[str, str] = {}

    def ask(what: str, argv: Sequence[str]) -> str:
        try:
            return run_or_reject(argv)
        except SlurmError as error:
            silent[what] = str(error)
            return ""

    listing = ("sacctmgr", "--noheader", "--parsable2", "show")
    return Site(
        cluster=read_cluster(text),
        config=parse_config(text),
        partitions=read_partitions(ask("partitions", ["scontrol", "show", "partition"])),
        shapes=read_shapes(ask("nodes", ["sinfo", "--noheader", f"--format={NODE_FORMAT}"])),
        qos=read_qos(ask("QOS", [*listing, "qos", f"format={','.join(QOS_COLUMNS)}"])),
        accounts=read_accounts(ask("accounts", [*listing, "assoc", f"user={user}", f"format={','.join(ACCOUNT_COLUMNS)}"])),
        silent=silent,
    )
