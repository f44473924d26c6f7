"""Which partition and QOS a node count and time limit imply, by the site's rules; or the rule that refuses them.

Limits come from the cluster profile in their own units. Knows nothing of what is free now: that is Slurm's.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.config.cluster_schema import ClusterConfig, QosConfig
from hpcmoe.config.schema import SlurmConfig
from hpcmoe.errors import UserError, unknown_name


@dataclass(frozen=True)
class Queue:
    """Where the job goes. ``qos`` None: Slurm's default is right, or the site has none. ``rule``: why this one."""

    partition: str | None
    qos: str | None
    time: str | None
    rule: str


def seconds(text: str) -> float:
    """A Slurm time: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = text.partition("-")
    try:
        if dash:
            parts = [int(p) for p in rest.split(":")] + [0, 0]
            return int(days) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]
        parts = [int(p) for p in text.split(":")]
    except ValueError as error:
        raise UserError(f"slurm.time={text!r} is not a time of Slurm's; write 24:00:00, 4-00:00:00 or minutes") from error
    if len(parts) == 1:
        return parts[0] * 60
    if len(parts) == 2:
        return parts[0] * 60 + parts[1]
    return parts[0] * 3600 + parts[1] * 60 + parts[2]


def refusal(name: str, rule: QosConfig, cluster: ClusterConfig, nodes: int, time: str | None) -> str | None:
    """Why a QOS will not take the job, with the numbers; None when it will."""
    cores = nodes * (cluster.cpus_per_node or 0)
    why = f" ({rule.rule})" if rule.rule else ""
    if rule.max_nodes is not None and nodes > rule.max_nodes:
        return f"{name} takes at most {rule.max_nodes} nodes{why}"
    if rule.min_nodes is not None and nodes < rule.min_nodes:
        return f"{name} starts at {rule.min_nodes} nodes{why}"
    if rule.max_cores is not None and cores > rule.max_cores:
        return f"{name} takes at most {rule.max_cores} cores, and {nodes} nodes have {cores}{why}"
    if time is None:
        return None
    if rule.max_time is not None and seconds(time) > seconds(rule.max_time):
        return f"{name} runs at most {rule.max_time}, and slurm.time={time}{why}"
    if rule.max_node_minutes is not None and nodes * seconds(time) / 60 > rule.max_node_minutes:
        return f"{name} takes at most {rule.max_node_minutes:g} node-minutes, and {nodes} nodes for {time} are more{why}"
    return None


def _queue(name: str, rule: QosConfig, slurm: SlurmConfig) -> Queue:
    is_partition = rule.kind == "partition"
    limits = [f"at most {rule.max_nodes} nodes" if rule.max_nodes else "", f"at most {rule.max_time}" if rule.max_time else ""]
    limits.insert(0, f"from {rule.min_nodes} nodes" if rule.min_nodes else "")
    text = ", ".join(part for part in (*limits, rule.rule or "") if part)
    return Queue(
        partition=name if is_partition else rule.partition or slurm.partition,
        qos=slurm.qos if is_partition else name,
        time=slurm.time or rule.max_time,
        rule=f"{name}: {text}" if text else name,
    )


def choose(cluster: ClusterConfig, slurm: SlurmConfig, nodes: int) -> Queue:
    """The queue for a job. A QOS or partition the user named is checked, not replaced. Raises UserError with the site's rule."""
    rules, time = cluster.qos, slurm.time
    if not rules:
        return Queue(slurm.partition, slurm.qos, time, f"{cluster.name} has no rules on record")
    qoses = {name: rule for name, rule in rules.items() if rule.kind == "qos"}
    named = slurm.qos if qoses else slurm.partition
    if named is not None:
        if named not in rules:
            if qoses:
                raise UserError(unknown_name(f"QOS on {cluster.name}", named, qoses))
            return Queue(named, slurm.qos, time, f"{cluster.name} has no rules on record for {named}")
        reason = refusal(named, rules[named], cluster, nodes, time)
        if reason is None:
            return _queue(named, rules[named], slurm)
        raise UserError(_refused(cluster, nodes, time, [reason], _other(cluster, nodes, time)))
    reasons = []
    for name, rule in rules.items():
        if rule.kind == "qos" and slurm.partition and rule.partition not in (None, slurm.partition):
            continue
        reason = refusal(name, rule, cluster, nodes, time)
        if reason is None:
            return _queue(name, rule, slurm)
        reasons.append(reason)
    if not reasons:
        return Queue(slurm.partition, slurm.qos, time, f"{cluster.name} has no rules on record for {slurm.partition}")
    raise UserError(_refused(cluster, nodes, time, reasons, None))


def _other(cluster: ClusterConfig, nodes: int, time: str | None) -> str | None:
    for name, rule in cluster.qos.items():
        if refusal(name, rule, cluster, nodes, time) is None:
            return f"slurm.{rule.kind}={name} would take it"
    return None


def _refused(cluster: ClusterConfig, nodes: int, time: str | None, reasons: list[str], other: str | None) -> str:
    span = f" for {time}" if time else ""
    return f"nodes={nodes}{span} on {cluster.name}: {'; '.join(reasons)}" + (f"; {other}" if other else "")
