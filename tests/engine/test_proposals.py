"""Layouts that the planner proposes for the testbed really train: some of one node's; HPCMOE_ALL_PROPOSALS=1: all of all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engine import proposal_cases
from tests.engine.ranks import run_together, write_text

pytestmark = pytest.mark.multiprocess
NODES, EVERY = ([1, 2, 3, 4], 1) if os.environ.get("HPCMOE_ALL_PROPOSALS") == "1" else ([1], 3)


@pytest.mark.parametrize("nodes", NODES)
def test_proposed_layouts_train_a_step_with_the_same_loss(tmp_path: Path, nodes: int) -> None:
    text = write_text(tmp_path / "text")
    run_together(4 * nodes, tmp_path, proposal_cases.each_proposal_trains, text, tmp_path, nodes, EVERY, patience_s=3000.0)
