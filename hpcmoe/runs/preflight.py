"""``python -m hpcmoe.runs.preflight RUN_DIR``: what the test of the job's nodes means for this attempt.

Exit code 0: the ranks may start, on all nodes or on those in ``ranks-on``; 1: they may not, and the journal says why; 2: error.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcmoe.errors import UserError
from hpcmoe.files import read_json, write_atomic
from hpcmoe.runs.blame import excluded_by
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.nodes import BLAMED, Card, sick
from hpcmoe.runs.place import Place, this_place
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.settle import settle
from hpcmoe.runs.store import raw_config
from hpcmoe.slurm.parse import expand_hostlist

GO_ON, REFUSED, ERROR = 0, 1, 2
FIGURES = ("memory_gb_s", "matmul_tflops", "write_mb_s", "all_reduce_gb_s", "seconds")


def judge(run: RunDir, place: Place) -> int:
    """Journal the figures and the sick nodes, and decide on which nodes the ranks start."""
    config, hosts = raw_config(run), expand_hostlist(place.nodelist)
    cards = read_cards(run.preflight(place.attempt))
    if run.notice(place.attempt).exists():  # asked to stop meanwhile: the ranks see it, too, and leave in order
        start_on(run, place, config, hosts, hosts[: int(config["nodes"])])
        return GO_ON
    found = sick(cards, hosts, int(config["gpus_per_node"]), config["cluster"]["device"])
    whole = len(cards) == len(hosts) * int(config["gpus_per_node"]) and all(card.get("part") == "done" for card in cards.values())
    problem = None if whole or found else _problem(cards)
    journal = Journal(run.journal, place.attempt)
    journal.append("preflight", sick=found, problem=problem, **summary(cards))
    for node, why in found.items():
        journal.append(BLAMED, node=node, why="preflight", evidence=why, sure=True)
        print(f"hpcmoe: preflight: node {node} is left out: {why}", file=sys.stderr, flush=True)
    if problem is not None:
        print(f"hpcmoe: preflight: {problem}", file=sys.stderr, flush=True)
        return REFUSED
    given_up = excluded_by(run, config)  # Slurm may not have kept the job off these
    healthy = sorted((host for host in hosts if host not in found), key=lambda host: host in given_up)
    nodes = how_many(config, len(healthy))
    if nodes is None:
        print(
            f"hpcmoe: preflight: {len(healthy)} of {len(hosts)} nodes are well, too few for this run", file=sys.stderr, flush=True
        )
        return REFUSED
    start_on(run, place, config, hosts, [host for host in hosts if host in healthy[:nodes]])
    return GO_ON


def read_cards(folder: Path) -> dict[int, Card]:
    """Every rank's figures, by rank."""
    found = (read_json(path) for path in sorted(folder.glob("rank-*.json")))
    return {int(card["rank"]): card for card in found if isinstance(card, dict) and "rank" in card}


def _problem(cards: Mapping[int, Card]) -> str:
    """Why the test failed although no node can be named."""
    for rank, card in sorted(cards.items()):
        if card.get("error"):
            return f"rank {rank}: {card.get('part')}: {card['error']}"
    return "no rank gave figures" if not cards else "some ranks did not end the test"


def summary(cards: Mapping[int, Card]) -> dict[str, Any]:
    """Median and slowest of each figure."""
    told: dict[str, Any] = {}
    for name in FIGURES:
        values = [float(card[name]) for card in cards.values() if name in card]
        if values:
            told[name] = {"median": round(statistics.median(values), 4), "least": min(values), "most": max(values)}
    return told


def how_many(config: dict[str, Any], healthy: int) -> int | None:
    """On how many nodes the ranks run: as many as the run wants, an elastic run on fewer; None: there are too few."""
    most, fewest = int(config["nodes"]), int(config["min_nodes"] or config["nodes"])
    return min(most, healthy) if healthy >= fewest else None


def start_on(run: RunDir, place: Place, config: dict[str, Any], hosts: list[str], chosen: list[str]) -> None:
    """Tell the job script, and lay an elastic run out for them."""
    left_out = [host for host in hosts if host not in chosen]
    if left_out:
        write_atomic(run.ranks_on(place.attempt), f"{len(chosen)} {chosen[0]} {','.join(left_out)}\n")
        Journal(run.journal, place.attempt).append("nodes_left_out", nodes=left_out, ranks_on=chosen)
    if config["min_nodes"]:
        settle(run, place.attempt, len(chosen))


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m hpcmoe.runs.preflight RUN_DIR", file=sys.stderr)
        return ERROR
    try:
        return judge(RunDir(Path(argv[0])), this_place())
    except (UserError, OSError) as error:
        print(f"hpcmoe: {error}", file=sys.stderr)
        return ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
