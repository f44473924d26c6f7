"""Which node is to blame for an attempt's end, and which nodes a run stays away from for a while. Pure.

The evidence is gathered, and the exclusion asked for, in hpcmoe.runs.blame. A blame is ``sure`` where a node was seen to fail
(Slurm says so, its ranks fell silent, it failed the preflight); a rank that crashed is no more than a strike against its node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcmoe.runs.journal import Event

BLAMED = "node_blamed"
STRAGGLER = "straggler"  # journalled while an attempt runs (hpcmoe.engine.callbacks.straggler)
# What a rank says whose peer has gone (gloo, NCCL, TCPStore): it is a witness, not the culprit.
_WITNESS = re.compile(
    r"Connection (?:closed by peer|reset|refused)|Broken pipe|Read error|Socket closed|Timed out waiting|did not meet the others"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|Watchdog caught collective|DistNetworkError",
    re.IGNORECASE,
)
# srun's own lines (src/api/step_launch.c, src/srun/libsrun/launch.c): "srun: error: n0002: task 1: Killed"
_TASKS = re.compile(r"^srun: error: (?P<host>[^\s:]+): tasks? (?P<first>\d+)[\d,-]*: (?P<how>.+)$")
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (?P<host>[^\s.]+)")
_LAUNCH = re.compile(r"^srun: error: Task launch for \S+ failed on node (?P<host>[^\s:]+): (?P<how>.+)$")
# From here on srun itself ends the tasks.
_ENDED_BY_SRUN = re.compile(
    r"^srun: (?:Terminating|launch/slurm: .*: Terminating|Job step .* aborted|step:.*Terminat)", re.IGNORECASE
)


@dataclass(frozen=True)
class Evidence:
    """What an attempt left behind. Ranks are numbered node by node, as srun places them."""

    hosts: tuple[str, ...]  # where ranks ran, in their order
    ranks_per_node: int
    made_a_step: bool = False
    down: Mapping[str, str] = field(default_factory=dict)  # hosts that Slurm calls down, with its words
    srun: str = ""  # srun's own messages
    errors: Mapping[int, str] = field(default_factory=dict)  # tracebacks by rank
    behind: Sequence[Mapping[str, Any]] = ()  # the watchdog's report: rank, silent, ...

    def host(self, rank: int) -> str | None:
        index = rank // self.ranks_per_node
        return self.hosts[index] if index < len(self.hosts) else None


@dataclass(frozen=True)
class Blame:
    node: str
    why: str  # node_failure | hang | crash | preflight
    evidence: str  # one line
    sure: bool


def blamed(evidence: Evidence) -> list[Blame]:
    """The nodes that failed before all others; empty where no single cause can be told from its effects."""
    down = dict(evidence.down)
    for line in evidence.srun.splitlines():
        if (match := _NODE_FAILURE.match(line)) is not None and match["host"] in evidence.hosts:
            down.setdefault(match["host"], line.removeprefix("srun: error: "))
    if down:
        return [Blame(host, "node_failure", words, sure=True) for host, words in sorted(down.items())]
    if evidence.behind:
        return _of_hang(evidence)
    found = _of_crash(evidence)
    return [found] if found is not None else []


def _of_hang(evidence: Evidence) -> list[Blame]:
    silent = [one for one in evidence.behind if one.get("silent")]
    waited_for = silent or list(evidence.behind)
    hosts = {evidence.host(int(one["rank"])) for one in waited_for}
    if len(hosts) != 1 or len(evidence.hosts) < 2 or None in hosts:
        return []  # on a single node nobody can say that another would have done better
    ranks = ", ".join(str(one["rank"]) for one in waited_for[:8])
    words = f"no progress; {'silent' if silent else 'behind'}: rank {ranks}"
    return [Blame(str(hosts.pop()), "hang", words, sure=bool(silent))]


def _of_crash(evidence: Evidence) -> Blame | None:
    """The one node on which ranks failed by themselves, and not because their peers had gone."""
    launch = [match for line in evidence.srun.splitlines() if (match := _LAUNCH.match(line))]
    own = {match["host"]: match["how"] for match in launch if match["host"] in evidence.hosts}
    own |= _killed(evidence)
    for rank, text in evidence.errors.items():
        host, last = evidence.host(rank), _last_line(text)
        if host is not None and last and not _WITNESS.search(text):
            own.setdefault(host, f"rank {rank}: {last}")
    if len(own) != 1:
        return None
    if len(evidence.hosts) == 1 and evidence.made_a_step:
        return None  # it was good enough for the steps before
    ((host, words),) = own.items()
    return Blame(host, "crash", words, sure=False)


def _killed(evidence: Evidence) -> dict[str, str]:
    """Hosts whose tasks died by a signal of their own, or left with a bad exit code and no traceback.

    srun ends tasks with TERM and KILL: those count only before it began to. What aborts (NCCL's watchdog does, on every rank) is
    counted whenever it comes, so that the first of many is not taken for the only one.
    """
    found: dict[str, str] = {}
    ending = False
    for line in evidence.srun.splitlines():
        ending = ending or bool(_ENDED_BY_SRUN.match(line))
        match = _TASKS.match(line)
        if match is None or match["host"] not in evidence.hosts or "Terminated" in match["how"]:
            continue
        traceback = evidence.errors.get(int(match["first"]))
        if "Exited with exit code" in match["how"]:
            own = traceback is None
        else:
            own = not ("Killed" in match["how"] and ending) and not (traceback and _WITNESS.search(traceback))
        if own:
            found.setdefault(match["host"], f"rank {match['first']}: {match['how']}")
    return found


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _message(event: Event) -> str:
    """What was said, without ranks, ids and other numbers. A rank that is slow on every node has more to do."""
    if event["event"] == STRAGGLER:
        return f"straggler {event.get('rank')}"
    return re.sub(r"\d+", "N", str(event.get("evidence", "")))


def excluded(events: Iterable[Event], now: float, for_s: float, strikes: int, straggler: str = "report") -> dict[str, float]:
    """The nodes to stay away from, each with the time (epoch s) until which.

    One sure blame is enough, ``strikes`` others are. A crash that says the same on another node is the program's own.
    ``straggler``: "exclude", and a straggler is enough; "report", and it counts as a strike beside a crash, and never alone.
    """
    blames = [event for event in events if event["event"] in (BLAMED, STRAGGLER) and now - float(event["t"]) < for_s]
    where: dict[str, set[str]] = {}
    for event in blames:
        if not event.get("sure"):
            where.setdefault(_message(event), set()).add(str(event["node"]))
    until: dict[str, float] = {}
    for node in dict.fromkeys(str(event["node"]) for event in blames):
        own = [event for event in blames if event["node"] == node]
        sure = [event for event in own if event.get("sure")]
        strikes_here = [event for event in own if not event.get("sure") and len(where[_message(event)]) == 1]
        slow = {event.get("attempt") for event in strikes_here if event["event"] == STRAGGLER}  # several ranks are one strike
        crashes = sum(event["event"] == BLAMED for event in strikes_here)
        if sure or (crashes and crashes + len(slow) >= strikes) or (slow and straggler == "exclude"):
            until[node] = max(float(event["t"]) for event in [*sure, *strikes_here]) + for_s
    return until


def without(hosts: Mapping[str, float], wanted: Iterable[str], most: int | None) -> list[str]:
    """The nodes to exclude, none that the user asks for by name, and the ``most`` newest where more would leave too few."""
    keep = set(wanted)
    newest = sorted((host for host in hosts if host not in keep), key=lambda host: hosts[host], reverse=True)
    return sorted(newest if most is None else newest[: max(0, most)])


Card = Mapping[str, Any]  # one rank's figures (hpcmoe.engine.preflight)
# Of the median of all ranks' matrix products; CPU ranks share cores with whoever else is there.
SLOW = {"cuda": 0.7, "cpu": 0.1}


def sick(cards: Mapping[int, Card], hosts: Sequence[str], ranks_per_node: int, device: str) -> dict[str, str]:
    """The nodes that failed the preflight, each with its first reason. ``cards``: by rank, of those that wrote one.

    What fails on every node is nobody's fault: then none is named, unless there is only one.
    """
    speeds = sorted(float(card["matmul_tflops"]) for card in cards.values() if "matmul_tflops" in card)
    median = speeds[len(speeds) // 2] if speeds else 0.0
    found: dict[str, str] = {}
    for rank in range(len(hosts) * ranks_per_node):
        why = _unfit(cards.get(rank), median, SLOW[device])
        if why is not None:
            found.setdefault(hosts[rank // ranks_per_node], f"rank {rank}: {why}")
    if len(found) == len(hosts) > 1 or (len(hosts) == 1 and any("file system" in why for why in found.values())):
        return {}  # a file system is everybody's, and a lone node's cannot be told from it
    return found


def _unfit(card: Card | None, median: float, slow: float) -> str | None:
    if card is None:
        return "gave no figures"
    part, error = card.get("part"), card.get("error")
    if part != "all_reduce" and error:
        return f"{part}: {error}"
    if part not in ("all_reduce", "done") or (part == "all_reduce" and not error):
        return f"ended in: {part}"
    speed = float(card.get("matmul_tflops", 0.0))
    if speed < slow * median:
        return f"matmul: {speed:g} TFLOP/s, the median is {median:g}"
    return None  # a failed all-reduce says nothing about who failed it
