"""How often a run ends without warning: from its own attempts or, while there was no such ending, from a stated prior. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcmoe.runs.story import Attempt

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 a node (arXiv:2407.21783, section 3.3.4). That the nodes
# of other machines do as well is an assumption, and holds only until the run has an ending of its own to count.
NODE_MTBF_S = 2048 * 54 * 86400 / 419
# These endings say nothing about machines: the run was over, or a person wanted it to be.
WANTED = frozenset({"completed", "failed", "stopped", "paused", "cancelled"})


def span(seconds: float) -> str:
    """90 s, 15 min, 6335 h: a figure that is known roughly."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


@dataclass(frozen=True)
class Mtbf:
    """Mean time between endings that came before the run could save."""

    seconds: float
    failures: int  # that were counted
    held_s: float  # over so much time on nodes
    nodes: int

    @property
    def source(self) -> str:
        """Where the figure comes from, in words."""
        if self.failures:
            return f"{self.failures} without warning in {span(self.held_s)}"
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"assumed: none without warning yet, {span(NODE_MTBF_S)} a node, {nodes}"


def mtbf_of(attempts: Sequence[Attempt], nodes: int, now: float) -> Mtbf:
    """``attempts``: all of the run's; the open one counts up to ``now`` (epoch s).

    One that ended before its first step lost no work, whatever it died of: it is not counted.
    """
    failures = sum(_unwarned(attempt) for attempt in attempts)
    held = sum(attempt.held_s(now) for attempt in attempts)
    if failures and held > 0:
        return Mtbf(held / failures, failures, held, nodes)
    return Mtbf(NODE_MTBF_S / nodes, 0, held, nodes)


def _unwarned(attempt: Attempt) -> bool:
    ended = attempt.cause is not None and attempt.cause not in WANTED
    return ended and not attempt.left and attempt.first_step is not None
