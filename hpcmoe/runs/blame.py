"""Finding the node that is to blame for an attempt's end, and having Slurm leave it out: the edge of hpcmoe.runs.nodes.

The journal gets a line ``node_blamed`` for each; what is excluded follows from these lines alone, so that it runs out by itself.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from hpcmoe.files import read_json
from hpcmoe.runs.budget import UNPROVOKED
from hpcmoe.runs.ending import Cause
from hpcmoe.runs.journal import Event, Journal, read_journal
from hpcmoe.runs.nodes import BLAMED, Blame, Evidence, blamed, excluded, without
from hpcmoe.runs.rundir import RunDir
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.parse import compress_hostlist, expand_hostlist

READ_MOST = 65536  # bytes of an error file or of srun's messages, from its start


def why_ended(run: RunDir, attempt: str, cause: Cause, config: dict[str, Any]) -> tuple[Cause, str | None]:
    """The cause once the nodes are heard, and the words for it. Journals each node that is to blame.

    An ending of a run's own is the node's where that was seen to fail, or is given up for its strikes: a node on which everything
    dies must not use up the run's attempts.
    """
    if cause not in UNPROVOKED | {Cause.NODE_FAILURE}:
        return cause, None
    events = [event for event in read_journal(run.journal) if event.get("attempt") == attempt]
    idle = left_out(run, attempt)  # what the preflight kept ranks off ended nothing
    told = [event for event in events if event["event"] == BLAMED and event["node"] not in idle]
    if not told:
        evidence = gather(run, attempt, events, config, node_failed=cause is Cause.NODE_FAILURE)
        journal = Journal(run.journal, attempt)
        told = [_journal_blame(journal, blame) for blame in (blamed(evidence) if evidence is not None else [])]
    if not told:
        return cause, _problem_of_preflight(events)
    node = str(told[0]["node"])
    its_own = bool(told[0]["sure"]) or node in excluded_by(run, config)
    if not its_own and cause is Cause.HANG:
        return cause, None  # the watchdog's own words say more
    return (Cause.NODE_FAILURE if its_own else cause), f"node {node}: {told[0]['evidence']}"


def _journal_blame(journal: Journal, blame: Blame) -> Event:
    return journal.append(BLAMED, node=blame.node, why=blame.why, evidence=blame.evidence, sure=blame.sure)


def _problem_of_preflight(events: list[Event]) -> str | None:
    problems = [event["problem"] for event in events if event["event"] == "preflight" and event.get("problem")]
    return f"preflight: {problems[-1]}" if problems else None


def gather(run: RunDir, attempt: str, events: list[Event], config: dict[str, Any], node_failed: bool) -> Evidence | None:
    """What the attempt left; None where its nodes are not known, or there is no Slurm. ``events``: its own."""
    started = next((event for event in events if event["event"] == "attempt_started"), None)
    if started is None or config["cluster"]["scheduler"] != "slurm":
        return None
    folder = run.attempt(attempt)
    idle = left_out(run, attempt)
    hosts = tuple(str(host) for host in started.get("hosts") or () if host not in idle)
    errors = {int(path.stem.removeprefix("error-rank")): _read(path) for path in folder.glob("error-rank*.txt")}
    hang = read_json(run.hang(attempt))
    return Evidence(
        hosts=hosts,
        ranks_per_node=int((config.get("engine") or {}).get("tasks_per_node") or config["gpus_per_node"]),
        made_a_step=any(event["event"] == "first_step" for event in events),
        down=_down(hosts) if node_failed else {},
        srun=_read(run.srun_log(attempt)),
        errors={rank: errors[rank] for rank in sorted(errors)},
        behind=tuple(hang.get("behind", ())) if isinstance(hang, dict) else (),
    )


def left_out(run: RunDir, attempt: str) -> list[str]:
    """The nodes of the job that had no ranks."""
    try:
        words = run.ranks_on(attempt).read_text(encoding="utf-8").split()
    except OSError:
        return []
    return words[2].split(",") if len(words) > 2 else []


def _read(path: Any) -> str:
    try:
        with path.open("rb") as file:
            return str(file.read(READ_MOST).decode("utf-8", errors="replace"))
    except OSError:
        return ""


def _down(hosts: tuple[str, ...]) -> dict[str, str]:
    try:
        return client.down_nodes(hosts)
    except SlurmError as error:
        print(f"hpcmoe: Slurm cannot be asked which node failed: {error}", file=sys.stderr)
        return {}


def excluded_by(run: RunDir, config: dict[str, Any]) -> list[str]:
    """The nodes that the run stays away from now."""
    resilience = config["resilience"]
    if "exclude_for_s" not in resilience:
        return []  # a run that is older than the key
    until = excluded(
        read_journal(run.journal),
        time.time(),
        float(resilience["exclude_for_s"]),
        int(resilience["strikes_to_exclude"]),
        str(resilience.get("straggler", "report")),
    )
    all_nodes, own = config["cluster"]["nodes"], config["slurm"]
    wanted = expand_hostlist(own["nodelist"] or "")
    fewest = int(config.get("min_nodes") or config["nodes"]) + int(config.get("spare_nodes") or 0)
    most = None if all_nodes is None else int(all_nodes) - fewest - len(expand_hostlist(own["exclude"] or ""))
    return without(until, wanted, most)


def exclude_flag(run: RunDir, config: dict[str, Any]) -> list[str]:
    """sbatch's --exclude for the run's next job, where there are nodes to stay away from; it wins over the script's."""
    nodes = excluded_by(run, config)
    return [f"--exclude={_with_own(nodes, config)}"] if nodes else []


def _with_own(nodes: list[str], config: dict[str, Any]) -> str:
    """The user's own slurm.exclude, and ``nodes``."""
    return ",".join(filter(None, (config["slurm"]["exclude"], compress_hostlist(nodes))))


def stay_away(run: RunDir, job_id: str, attempt: str | None, config: dict[str, Any]) -> None:
    """Have Slurm start the requeued job elsewhere. Where it will not, the run goes on where it is put."""
    nodes = excluded_by(run, config)
    journal = Journal(run.journal, attempt)
    asked = [event for event in read_journal(run.journal) if event["event"] == "nodes_excluded" and event["job_id"] == job_id]
    if nodes == (asked[-1]["nodes"] if asked else []):
        return
    try:
        client.exclude_nodes(job_id, _with_own(nodes, config))
    except SlurmError as refused:
        print(f"hpcmoe: job {job_id} may start on {','.join(nodes)} again: {refused}", file=sys.stderr)
        return
    journal.append("nodes_excluded", job_id=job_id, nodes=nodes)
