"""Elastic runs: ``nodes=LOW..HIGH``, and the config of such a run on the nodes that an attempt really got. Pure.

Every count from LOW to HIGH must make a layout, since Slurm may start the run on any of them. Memory is judged elsewhere
(hpcmoe.planner.elastic).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable

from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError

RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)


def read_nodes(written: object) -> tuple[int, int | None]:
    """(nodes, min_nodes) of what a person wrote: ``4`` or ``2..4``. Raises UserError for anything else."""
    text = "null" if written is None else str(written).strip()
    match = RANGE.fullmatch(text)
    if match is not None:
        low, high = int(match[1]), int(match[2])
        if not 0 < low <= high:
            raise UserError(f"nodes={text}: write nodes=LOW..HIGH with 0 < LOW <= HIGH")
        return high, low if low < high else None
    if isinstance(written, bool) or re.fullmatch(r"[+-]?\d+", text, re.ASCII) is None:
        raise UserError(f"nodes={text}: not a whole number")
    return int(text), None


def counts(config: Config) -> range:
    """The numbers of nodes that an attempt may get."""
    return range(config.min_nodes or config.nodes, config.nodes + 1)


def on_nodes(config: Config, nodes: int) -> Config:
    """The config of one attempt of an elastic run, without spare nodes, its layout still open where the user left it open.

    With layout.dp_shard given the replicas follow the nodes; otherwise the shards do.
    """
    config = copy.deepcopy(config)
    config.nodes, config.min_nodes, config.spare_nodes = nodes, None, 0
    layout = config.layout
    fixed = layout.pp * layout.tp * (layout.dp_shard or 0)
    if fixed and layout.dp_replicate == 1 and config.world_size % fixed == 0:
        layout.dp_replicate = config.world_size // fixed
    return config


def check_counts(config: Config, check: Callable[[Config], object]) -> None:
    """``check`` the run on every number of nodes that it may get. Raises UserError that names those which cannot be used."""
    why = _failing(config, check)
    if not why:
        return
    first = why[min(why)]
    rule = first.partition("; ")[0]  # what would be right for that one number of nodes is not right for all
    if len(why) == len(counts(config)):
        raise UserError(first)  # a mistake of another kind
    numbers = ", ".join(map(str, sorted(why)))
    raise UserError(
        f"nodes={config.min_nodes}..{config.nodes}: Slurm may start the run on any number of these, and {numbers} cannot be used "
        f"({rule}){_advice(config, check, set(counts(config)) - set(why))}"
    )


def _failing(config: Config, check: Callable[[Config], object]) -> dict[int, str]:
    why = {}
    for nodes in counts(config):
        try:
            check(on_nodes(config, nodes))
        except UserError as error:
            why[nodes] = str(error)
    return why


def _advice(config: Config, check: Callable[[Config], object], good: set[int]) -> str:
    """A narrower range without a hole, and a batch that every count divides, where there are such."""
    words = []
    low, high = _longest(good)
    if high > low:
        words.append(f"nodes={low}..{high}")
    batch = _batch_for_all(config)
    if batch is not None:
        trial = copy.deepcopy(config)
        trial.train.global_batch_tokens = batch
        if not _failing(trial, check):
            words.append(f"train.global_batch_tokens={batch}")
    return f"; {' or '.join(words)} would do" if words else ""


def _longest(numbers: Iterable[int]) -> tuple[int, int]:
    """First and last of the longest stretch without a hole, the later of equals; (0, 0) of none."""
    best, start, last = (0, 0), 0, -1
    for number in sorted(numbers):
        start = number if number != last + 1 else start
        last = number
        if last - start >= best[1] - best[0]:
            best = (start, last)
    return best


def _batch_for_all(config: Config) -> int | None:
    """The multiple nearest to the wanted batch that the data-parallel ranks of every count divide; None if none is near."""
    unit = config.train.seq_len
    for nodes in counts(config):
        ranks, rest = divmod(nodes * config.gpus_per_node, config.layout.pp * config.layout.tp)
        if rest:
            return None
        unit = math.lcm(unit, config.train.seq_len * ranks)
    wanted = config.train.global_batch_tokens
    near = max(1, round(wanted / unit)) * unit
    return near if wanted / 2 <= near <= wanted * 2 else None
