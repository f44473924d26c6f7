"""The layout of one attempt of an elastic run: on as many nodes as it got, with what the user fixed as it is. Torch-free.

The first choice is that of a run that asks for exactly so many nodes (hpcmoe.config.validate). Where it does not fit into memory,
and only there, the planner searches what the user left open.
"""

from __future__ import annotations

from hpcmoe.config.elastic import on_nodes
from hpcmoe.config.schema import Config
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.planner import explain
from hpcmoe.planner.machine import from_cluster
from hpcmoe.planner.plan import workload
from hpcmoe.planner.search import Candidate, Pins, Search
from hpcmoe.planner.shapes import from_config


def pins_of(config: Config) -> Pins:
    """The config's layout, every size of it that is given."""
    layout = config.layout
    return Pins(
        pp=layout.pp,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        tp=layout.tp,
        ep=layout.ep,
        ep_placement=layout.ep_placement,
        schedule=layout.schedule if layout.pp > 1 else None,
        microbatch=layout.microbatch,
        recompute=layout.recompute,
    )


def lay_out(config: Config, nodes: int) -> Config:
    """The resolved config of an attempt on ``nodes`` nodes. Raises UserError where no layout can be, or none fits."""
    opened = on_nodes(config, nodes)
    resolved = validate(opened)
    if config.cluster.gpu.mem_gib is None:
        return resolved  # nothing is known of this machine's memory
    search, chosen = _best(resolved, pins_of(resolved))
    if chosen is None:
        raise UserError(explain.nothing_divides(search))
    if chosen.fits:
        return resolved
    _, found = _best(opened, pins_of(opened))
    if found is None or not found.fits:
        raise UserError(f"impossible: {explain.too_big(search, chosen)}")
    for name in ("dp_replicate", "dp_shard", "ep", "ep_placement", "microbatch"):
        setattr(opened.layout, name, getattr(found.layout, name))
    return validate(opened)


def _best(config: Config, pins: Pins) -> tuple[Search, Candidate | None]:
    machine = from_cluster(config.cluster, config.gpus_per_node)
    search = Search(from_config(config.model), workload(config), machine, config.nodes, pins)
    return search, next(iter(search.run()), None)
