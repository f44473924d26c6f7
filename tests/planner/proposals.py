"""Every layout that the planner could propose on the testbed, as overrides of submit: what the engine must be able to run.

PYTHONPATH=. python -m tests.planner.proposals 4      # for four nodes, sixteen ranks; without recompute's modes: --sizes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.machine import from_cluster
from hpcmoe.planner.plan import workload
from hpcmoe.planner.search import Search
from hpcmoe.planner.shapes import from_config

NAMES = ("pp", "dp_replicate", "dp_shard", "tp", "ep", "ep_placement", "schedule", "microbatch", "recompute")


def config_for(nodes: int, *overrides: str) -> Config:
    return load(["cluster=testbed", f"nodes={nodes}", "train.global_batch_tokens=12288", *overrides])


def proposals(config: Config) -> Iterator[Layout]:
    """What a search for this config chooses from, speeds and memory aside."""
    machine = from_cluster(config.cluster, config.gpus_per_node)
    search = Search(from_config(config.model), workload(config), machine, config.nodes)
    for sizes in search._sizes():
        for layout in (sizes, *search._variants(sizes)):
            if search.microbatches(layout) is not None:
                for mode in search._modes(layout):
                    yield from search._placed(replace(layout, recompute=mode))


def overrides(layout: Layout) -> list[str]:
    return [f"layout.{name}={getattr(layout, name)}" for name in NAMES]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=int)
    parser.add_argument("--sizes", action="store_true", help="one line for all microbatches and recompute modes")
    args = parser.parse_args()
    seen = set()
    for found in proposals(config_for(args.nodes)):
        key = replace(found, microbatch=1, recompute="none") if args.sizes else found
        if key not in seen:
            seen.add(key)
            print(*overrides(found))
