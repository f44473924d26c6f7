"""What a site's Slurm means for a run, in words: findings of `hpcmoe doctor`. Pure; hpcmoe.slurm.site has the facts.

Sources of the rules: Slurm's man pages (slurm.conf, sbatch, scontrol) and what a real 22.05 did (docs/recovery.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcmoe.slurm.parse import format_duration, parse_duration
from hpcmoe.slurm.site import Account, Partition, Qos, Site

LEVELS = ("ok", "warn", "bad", "unknown")
TRIED_FROM = (22, 5)
SHORT_MEMORY_S = 60.0
SHOWN_PARTITIONS = 12


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    level: str  # ok | warn | bad | unknown
    says: str
    fix: str | None = None  # what to change


@dataclass(frozen=True)
class Asks:
    """What a run would ask of Slurm, and what is measured of saving. None: not given, not known."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    requeue: bool = True
    stop_lead_s: float = 120.0
    user: str = ""
    save_s: float | None = None  # the longest leaving save of any run here
    step_s: float | None = None  # the longest step


def findings(site: Site, asks: Asks) -> list[Finding]:
    """Everything there is to say, in the order in which it matters."""
    partition = site.partition(asks.partition)
    found = [_version(site), *_silent(site), *_partitions(site, asks, partition), *_accounts(site, asks, partition)]
    found += preemption(site, asks, partition)
    return [*found, *_coming_back(site, asks), *_time_limit(asks, partition), *_rest(site)]


def _version(site: Site) -> Finding:
    version = site.cluster.version
    words = ".".join([*map(str, version[:1]), *(f"{part:02d}" for part in version[1:2]), *map(str, version[2:])])
    name = f"Slurm {words or 'of unknown version'}, cluster {site.cluster.cluster_name or '?'}"
    if not version:
        return Finding("slurm", "unknown", name)
    if version < TRIED_FROM:
        return Finding("slurm", "unknown", f"{name}; hpcmoe was tried with 22.05 and later")
    return Finding("slurm", "ok", name)


def _silent(site: Site) -> Iterator[Finding]:
    for what, why in site.silent.items():
        yield Finding("slurm", "unknown", f"{what} could not be asked: {why}")


# ---- where it may run -------------------------------------------------------------------------------------------------


def _partitions(site: Site, asks: Asks, chosen: Partition | None) -> Iterator[Finding]:
    if not site.partitions:
        return
    names = [part.facts.name + ("*" if part.default else "") for part in site.partitions]
    more = f" and {len(names) - SHOWN_PARTITIONS} more" if len(names) > SHOWN_PARTITIONS else ""
    listed = ", ".join(names[:SHOWN_PARTITIONS]) + more
    if chosen is None and asks.partition is not None:
        yield Finding("partition", "bad", f"there is no partition {asks.partition!r}; there are {listed}", "set slurm.partition")
        return
    if chosen is None:
        yield Finding("partition", "warn", f"no default partition; there are {listed}", "set slurm.partition=NAME")
        return
    facts = chosen.facts
    limits = [f"{chosen.nodes} nodes" if chosen.nodes is not None else "nodes unknown"]
    limits.append(f"at most {facts.max_nodes} a job" if facts.max_nodes else "no limit of nodes a job")
    limits.append(f"at most {format_duration(facts.max_time_s)}" if facts.max_time_s else "no time limit")
    if (own := site.qos_named(chosen.own_qos)) is not None:
        limits.append(f"limits of QOS {_limits(own)} hold for all its jobs")
    says = f"{facts.name}: {', '.join(limits)}; all: {listed}"
    if not facts.up:
        yield Finding("partition", "bad", f"{says}; it is not UP", "wait, or choose another: slurm.partition=NAME")
        return
    yield Finding("partition", "ok", says)
    wanted = _seconds(asks.time)
    if wanted is not None and facts.max_time_s is not None and wanted > facts.max_time_s:
        refused = site.config.get("EnforcePartLimits", "NO") not in ("NO", "(null)")
        what = "sbatch refuses it" if refused else "such a job is taken and waits for ever (PartitionTimeLimit)"
        most = format_duration(facts.max_time_s)
        yield Finding("time", "bad", f"slurm.time={asks.time} is above {facts.name}'s {most}: {what}", f"set slurm.time={most}")


def _seconds(time: str | None) -> float | None:
    try:
        return None if time is None else parse_duration(time)
    except ValueError:
        return None  # config.validate says so, better


def _accounts(site: Site, asks: Asks, partition: Partition | None) -> Iterator[Finding]:
    enforced = "associations" in site.config.get("AccountingStorageEnforce", "") or "limits" in site.config.get(
        "AccountingStorageEnforce", ""
    )
    if "accounts" in site.silent or not site.cluster.accounting:
        return
    names = sorted({one.account for one in site.accounts})
    if not names:
        level = "bad" if enforced else "ok"
        says = f"user {asks.user} has no account" + ("; jobs are refused" if enforced else ", and none is needed here")
        yield Finding("account", level, says, "ask the site for a budget" if enforced else None)
        return
    mine: Sequence[Account] = [one for one in site.accounts if asks.account in (None, one.account)]
    if not mine:
        yield Finding("account", "bad", f"slurm.account={asks.account} is none of yours: {', '.join(names)}", "set slurm.account")
        return
    advice = "set slurm.account=NAME, so that the right one is charged" if asks.account is None and len(names) > 1 else None
    yield Finding("account", "warn" if advice else "ok", f"yours: {', '.join(names)}", advice)
    if partition is not None and partition.accounts and not ({one.account for one in mine} & set(partition.accounts)):
        allowed = ", ".join(partition.accounts[:8])
        says = f"partition {partition.facts.name} takes only {allowed}, and not yours"
        yield Finding("account", "bad", says, "choose another partition or account")
    yield from _qos(site, asks, partition, mine)


def _qos(site: Site, asks: Asks, partition: Partition | None, mine: Sequence[Account]) -> Iterator[Finding]:
    allowed = sorted({name for one in mine for name in one.qos})
    if asks.qos is not None and allowed and asks.qos not in allowed:
        yield Finding("qos", "bad", f"slurm.qos={asks.qos} is none of yours: {', '.join(allowed)}", "set slurm.qos")
        return
    if partition is not None and partition.qos and asks.qos is not None and asks.qos not in partition.qos:
        says = f"partition {partition.facts.name} takes only the QOS {', '.join(partition.qos)}"
        yield Finding("qos", "bad", says, "set slurm.qos")
    words = [_limits(one) for one in site.qos if one.name in allowed]
    if words:
        yield Finding("qos", "ok", "; ".join(words))


def _limits(qos: Qos) -> str:
    limits = []
    if qos.max_nodes is not None:
        limits.append(f"at most {qos.max_nodes} nodes")
    if qos.min_nodes is not None:
        limits.append(f"at least {qos.min_nodes} nodes")
    if qos.max_time_s is not None:
        limits.append(f"at most {format_duration(qos.max_time_s)}")
    return f"{qos.name} (priority {qos.priority}{', ' if limits else ''}{', '.join(limits)})"


# ---- preemption -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How a job of some partition and QOS is preempted."""

    mode: str  # OFF | CANCEL | REQUEUE | SUSPEND
    grace_s: float
    by: str  # who preempts


def rule_of(site: Site, asks: Asks, partition: Partition | None) -> Rule | None:
    """None: it cannot be told from what Slurm shows."""
    kind = site.config.get("PreemptType", "")
    if kind in ("preempt/none", "", "(null)"):
        return Rule("OFF", 0.0, "nobody")
    cluster_mode = _mode(site.cluster.preempt_mode)
    if kind == "preempt/partition_prio":
        if partition is None:
            return None
        above = [part.facts.name for part in site.partitions if part.tier > partition.tier]
        mode = _mode(partition.facts.preempt_mode) if above else "OFF"
        return Rule(mode, partition.facts.grace_s, f"jobs of {', '.join(above[:6])}" if above else "nobody")
    if kind == "preempt/qos":
        default = next((one.default_qos or (one.qos[0] if len(one.qos) == 1 else None) for one in site.accounts), None)
        qos = site.qos_named(asks.qos or default)
        if qos is None:
            return None
        above = [one.name for one in site.qos if qos.name in one.preempts]
        mode = (cluster_mode if qos.preempt_mode.lower() == "cluster" else _mode(qos.preempt_mode)) if above else "OFF"
        return Rule(mode, qos.grace_s, f"jobs with QOS {', '.join(above[:6])}" if above else "nobody")
    return None


def _mode(text: str) -> str:
    words = set(text.upper().split(","))
    return next((word for word in ("SUSPEND", "REQUEUE", "CANCEL") if word in words), "OFF")


def preemption(site: Site, asks: Asks, partition: Partition | None) -> Iterator[Finding]:
    """What happens to a run that is preempted: what it hears, how long it has, whether that is enough."""
    rule = rule_of(site, asks, partition)
    kind = site.config.get("PreemptType", "?")
    if rule is None:
        missing = "the QOS of your jobs is not known" if kind == "preempt/qos" else "the partition of your jobs is not known"
        yield Finding("preemption", "unknown", f"{kind}, and {missing}", "name them: hpcmoe doctor slurm.partition=P slurm.qos=Q")
        return
    if rule.mode == "OFF":
        yield Finding("preemption", "ok", f"nothing preempts a run here ({kind})")
        return
    if rule.mode == "SUSPEND":
        yield Finding("preemption", "ok", f"{rule.by} suspend a run; it goes on later where it stood, and loses nothing")
        return
    kill_s = site.cluster.kill_wait_s if site.cluster.kill_wait_s is not None else 30.0
    window = rule.grace_s + kill_s
    if rule.grace_s:
        hears = "SIGUSR1 in its job script" if site.cluster.user_signal else "SIGTERM in its ranks"
        times = f"then {rule.grace_s:.0f} s of grace, then {kill_s:.0f} s until SIGKILL"
        says = f"{rule.by} preempt a run ({rule.mode}): {hears}, {times}"
    else:
        says = f"{rule.by} preempt a run ({rule.mode}) without grace time: SIGTERM, then {kill_s:.0f} s (KillWait) until SIGKILL"
    yield Finding("preemption", "ok", f"{says}; it finishes its step, saves and leaves")
    yield _enough(window, rule, asks)


def _enough(window: float, rule: Rule, asks: Asks) -> Finding:
    if asks.save_s is None:
        says = f"whether a step and a save fit into {window:.0f} s is not known: no run here has saved yet"
        return Finding("preemption", "unknown", says, "`hpcmoe status RUN` shows SAVE, once a run has left")
    need = asks.save_s + (asks.step_s or 0.0)
    measured = f"the longest step and save of the runs here took {need:.1f} s, and {window:.0f} s are left to them"
    fix = "save more often (checkpoint.interval), or choose a partition or QOS with more grace time"
    if need > window:
        return Finding("preemption", "bad", f"{measured}: steps since the last checkpoint would be lost", fix)
    if need > 0.6 * window or (rule.grace_s and need > rule.grace_s):
        return Finding("preemption", "warn", f"{measured}: little is to spare", fix)
    return Finding("preemption", "ok", measured)


def _coming_back(site: Site, asks: Asks) -> Iterator[Finding]:
    """After a preemption, a time limit, a failed node."""
    hold = f"{site.cluster.auth_cred_expire_s + 1:.0f} s"
    if not site.cluster.job_requeue and "JobRequeue" in site.config:
        says = (
            "JobRequeue=0: Slurm requeues no job; a run submits its successor from inside the job, and loses its age in the queue"
        )
        yield Finding(
            "requeue", "warn", says, "where compute nodes may not submit either, keep `hpcmoe supervise` on a login node"
        )
    elif not asks.requeue:
        yield Finding("requeue", "warn", "slurm.requeue=false: a run submits its successor instead", "set slurm.requeue=true")
    else:
        says = f"a run requeues itself; Slurm holds it for {hold}, which its owner may lift: hpcmoe does (resilience.lift_hold)"
        yield Finding("requeue", "ok", says)
    if limit := site.config.get("MaxBatchRequeue"):
        yield Finding(
            "requeue", "ok", f"MaxBatchRequeue={limit}: a job whose start fails so often is held by Slurm (JobHeldAdmin)"
        )


def _time_limit(asks: Asks, partition: Partition | None) -> Iterator[Finding]:
    wanted = _seconds(asks.time)
    if wanted is None:
        default = None if partition is None else partition.facts.default_time_s
        says = "no slurm.time: a job gets " + (
            f"the partition's {format_duration(default)}" if default else "the partition's limit"
        )
        yield Finding("time", "ok" if default else "warn", says, None if default else "set slurm.time, so that it can be planned")
    need = None if asks.save_s is None else asks.save_s + (asks.step_s or 0.0)
    if need is not None and need > asks.stop_lead_s:
        says = f"resilience.stop_lead_s={asks.stop_lead_s:.0f}, and the longest step and save here took {need:.1f} s"
        yield Finding("time", "bad", f"{says}: the time limit would cut a save", f"set resilience.stop_lead_s={2 * need:.0f}")


def _rest(site: Site) -> Iterator[Finding]:
    cluster = site.cluster
    if not cluster.accounting:
        says = (
            f"no accounting: {cluster.min_job_age_s:.0f} s after its end nobody can say how a job ended, and the run is UNKNOWN"
        )
        yield Finding("accounting", "warn", says, "keep `hpcmoe supervise` running, which looks in time")
    else:
        yield Finding("accounting", "ok", "Slurm remembers how jobs ended")
    if cluster.min_job_age_s < SHORT_MEMORY_S:
        says = (
            f"MinJobAge={cluster.min_job_age_s:.0f} s: the controller forgets ended jobs at once, so accounting is asked for each"
        )
        yield Finding("accounting", "warn", says)
    yield Finding(
        "sweep", "ok", f"a sweep is one array of up to {cluster.max_array_size} runs (MaxArraySize), longer ones are several"
    )
    if "jobs" in site.config.get("PrivateData", ""):
        yield Finding("queue", "ok", "other people's jobs are hidden (PrivateData=jobs): no place in the queue can be told")
