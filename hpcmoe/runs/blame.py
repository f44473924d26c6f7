"""Finding the node that is to blame for an attempt's end, and having Slurm leave it out: the edge of hpcmoe.runs.nodes.

The journal gets a line ``node_blamed`` for each; what is excluded follows from these lines alone, so that it runs out by itself.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from hpcmoe.files import read_json
from hpcmoe.runs.journal import Event, Journal, read_journal
from hpcmoe.runs.nodes import BLAMED, Blame, Evidence, blamed, excluded, without
from hpcmoe.runs.rundir import RunDir
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.parse import compress_hostlist, expand_hostlist

READ_MOST = 65536  # bytes of an error file or of srun's messages, from its start


@dataclass(frozen=True)
class Verdict:
    """A node that was found to have ended the attempt. ``out``: the run stays away from it now."""

    node: str
    words: str
    out: bool


def find_blame(run: RunDir, attempt: str, config: dict[str, Any], node_failed: bool) -> Verdict | None:
    """Journal which nodes are to blame for the end of ``attempt``; the first of them, or None where nobody can tell.

    ``node_failed``: Slurm says that a node failed, and is asked which. Only for endings that nobody asked for.
    """
    events = read_journal(run.journal)
    mine = [event for event in events if event.get("attempt") == attempt]
    told = [event for event in mine if event["event"] == BLAMED]  # by the preflight, or by an earlier look at this attempt
    if not told:
        evidence = gather(run, attempt, mine, config, node_failed)
        journal = Journal(run.journal, attempt)
        told = [_journal_blame(journal, blame) for blame in (blamed(evidence) if evidence is not None else [])]
    if not told:
        return None
    first = str(told[0]["node"])
    return Verdict(first, str(told[0]["evidence"]), out=first in excluded_by(run, config))


def _journal_blame(journal: Journal, blame: Blame) -> Event:
    return journal.append(BLAMED, node=blame.node, why=blame.why, evidence=blame.evidence, sure=blame.sure)


def gather(run: RunDir, attempt: str, events: list[Event], config: dict[str, Any], node_failed: bool) -> Evidence | None:
    """What the attempt left; None where its nodes are not known, or there is no Slurm. ``events``: its own."""
    started = next((event for event in events if event["event"] == "attempt_started"), None)
    if started is None or config["cluster"]["scheduler"] != "slurm":
        return None
    folder = run.attempt(attempt)
    hosts = tuple(training_hosts(run, attempt, [str(host) for host in started.get("hosts") or ()]))
    errors = {int(path.stem.removeprefix("error-rank")): _read(path) for path in folder.glob("error-rank*.txt")}
    hang = read_json(run.hang(attempt))
    return Evidence(
        hosts=hosts,
        ranks_per_node=int(config["gpus_per_node"]),
        made_a_step=any(event["event"] == "first_step" for event in events),
        down=_down(hosts) if node_failed else {},
        srun=_read(run.srun_log(attempt)),
        errors={rank: errors[rank] for rank in sorted(errors)},
        behind=tuple(hang.get("behind", ())) if isinstance(hang, dict) else (),
    )


def training_hosts(run: RunDir, attempt: str, allocated: list[str]) -> list[str]:
    """The nodes that had ranks: all of the job's, less those that were left out."""
    left_out = run.ranks_on(attempt)
    if not left_out.exists():
        return allocated
    words = left_out.read_text(encoding="utf-8").split()
    return [host for host in allocated if host not in (words[2].split(",") if len(words) > 2 else [])]


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
    until = excluded(
        read_journal(run.journal), time.time(), float(resilience["exclude_for_s"]), int(resilience["strikes_to_exclude"])
    )
    all_nodes, own = config["cluster"]["nodes"], config["slurm"]
    wanted = expand_hostlist(own["nodelist"] or "")
    fewest = int(config.get("min_nodes") or config["nodes"]) + int(config.get("spare_nodes") or 0)
    most = None if all_nodes is None else int(all_nodes) - fewest - len(expand_hostlist(own["exclude"] or ""))
    return without(until, wanted, most)


def exclude_words(run: RunDir, config: dict[str, Any]) -> str | None:
    """sbatch's --exclude for the run's next job: the user's own and the nodes to stay away from. None: nobody is excluded."""
    own = config["slurm"]["exclude"]
    nodes = excluded_by(run, config)
    return ",".join(filter(None, (own, compress_hostlist(nodes)))) or None


def stay_away(run: RunDir, job_id: str, attempt: str | None, config: dict[str, Any]) -> None:
    """Have Slurm start the requeued job elsewhere. Where it will not, the run goes on where it is put."""
    nodes = excluded_by(run, config)
    journal = Journal(run.journal, attempt)
    asked = [event for event in read_journal(run.journal) if event["event"] == "nodes_excluded" and event["job_id"] == job_id]
    if nodes == (asked[-1]["nodes"] if asked else []):
        return
    try:
        client.exclude_nodes(job_id, exclude_words(run, config) or "")
    except SlurmError as refused:
        print(f"hpcmoe: job {job_id} may start on {','.join(nodes)} again: {refused}", file=sys.stderr)
        return
    journal.append("nodes_excluded", job_id=job_id, nodes=nodes)
