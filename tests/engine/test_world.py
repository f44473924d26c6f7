"""Ranks must be on the hosts that the layout wants."""

from __future__ import annotations

import pytest

from hpcmoe.engine.support import Sizes
from hpcmoe.engine.world import misplaced


def sizes(tp: int, ep: int, placement: str = "inside") -> Sizes:
    return Sizes(1, 8 // tp, tp, 1, ep, 8 // ep, 8, 1, placement)


TWO_NODES = ["a"] * 4 + ["b"] * 4


@pytest.mark.parametrize(("tp", "ep", "placement"), [(4, 1, "inside"), (2, 4, "inside"), (2, 2, "across"), (1, 8, "inside")])
def test_a_layout_whose_groups_lie_in_nodes_is_in_its_place(tp: int, ep: int, placement: str) -> None:
    assert misplaced(sizes(tp, ep, placement), TWO_NODES) is None


def test_ranks_that_slurm_dealt_out_cyclically_are_named() -> None:
    said = misplaced(sizes(2, 1), ["a", "b"] * 4)
    assert said is not None
    assert "layout.tp=2 must lie inside a node, but ranks 0 to 1 are on a, b" in said
    assert "4 on a, 4 on b" in said


def test_an_uneven_allocation_is_named_where_it_cuts_a_group() -> None:
    uneven = ["a"] * 3 + ["b"] * 5
    assert "ranks 2 to 3 are on a, b" in (misplaced(sizes(2, 1), uneven) or "")
    assert "layout.ep=4" in (misplaced(sizes(1, 4), uneven) or "")


def test_experts_placed_across_nodes_may_be_anywhere() -> None:
    assert misplaced(sizes(1, 4, "across"), ["a", "b"] * 4) is None
