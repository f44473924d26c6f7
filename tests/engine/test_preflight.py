"""The test of a job's nodes on real ranks: what they find, and what a sick one says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hpcmoe.config.cluster_schema import ClusterConfig
from hpcmoe.config.schema import Precision
from hpcmoe.runs.preflight import read_cards
from tests.engine.ranks import Attempt, make_run, small_config, write_text

pytestmark = pytest.mark.multiprocess


def preflight(run_dir: Path) -> None:
    from hpcmoe.engine.preflight import main

    main([str(run_dir)])


def preflight_with_a_broken_adder(run_dir: Path) -> None:
    from hpcmoe.engine import preflight as module

    def broken(device: object) -> float:
        raise ArithmeticError("the same product came out different")

    module.MEET_S = 2.0
    if os.environ["RANK"] == "1":
        module.matmul_rate = broken
    module.main([str(run_dir)])


def test_ranks_that_are_well_give_all_figures_and_leave_nothing_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_config(write_text(tmp_path / "text"), 2, 2, 5))
    ranks = Attempt(run, "7.0", 2, engine=preflight)
    assert ranks.finish() == [0, 0], ranks.log()
    cards = read_cards(run.preflight("7.0"))
    assert sorted(cards) == [0, 1]
    for card in cards.values():
        assert card["part"] == "done", ranks.log()
        assert min(card[name] for name in ("memory_gb_s", "matmul_tflops", "write_mb_s", "all_reduce_gb_s")) > 0
    assert {path.suffix for path in run.preflight("7.0").iterdir()} == {".json"}


def test_a_rank_that_miscalculates_says_so_and_the_other_waits_no_longer_than_it_must(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_config(write_text(tmp_path / "text"), 2, 2, 5))
    ranks = Attempt(run, "7.0", 2, engine=preflight_with_a_broken_adder)
    assert ranks.finish() == [0, 0], ranks.log()
    cards = read_cards(run.preflight("7.0"))
    assert (cards[1]["part"], cards[1]["error"]) == ("matmul", "ArithmeticError: the same product came out different")
    assert (cards[0]["part"], "did not meet the others" in cards[0]["error"]) == ("all_reduce", True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_missing_on_one_of_several_nodes_does_not_end_the_run(tmp_path: Path) -> None:
    config = small_config(
        write_text(tmp_path / "text"), 1, 1, 5, cluster=ClusterConfig(name="test", scheduler="slurm", device="cuda")
    )
    config.precision.name = Precision.bf16
    alone = make_run(tmp_path / "alone", config)
    lone = Attempt(alone, "7.0", 1)
    assert lone.finish() == [2], lone.log()
    verdict = lone.verdict()
    assert verdict is not None
    assert verdict["verdict"] == "failed", "a mistake in the config"

    config.nodes, config.layout.dp_shard = 2, 2
    run = make_run(tmp_path / "two", config)
    other = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    rank = Attempt(run, "7.0", 1, other)
    assert rank.finish() == [1], rank.log()
    assert rank.verdict() is None
    assert "this rank sees no GPU" in (run.attempt("7.0") / "error-rank0001.txt").read_text()
