"""What the ranks' figures mean for the attempt: on which nodes it trains, or that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.freeze import freeze, load_frozen
from hpcmoe.config.validate import validate
from hpcmoe.files import write_json
from hpcmoe.runs.journal import read_journal
from hpcmoe.runs.nodes import sick
from hpcmoe.runs.place import Place
from hpcmoe.runs.preflight import GO_ON, REFUSED, judge
from hpcmoe.runs.rundir import RunDir

PLACE = Place("7.0", "7", 0, 3, "n[0001-0003]", "slurm")
HOSTS = ["n0001", "n0002", "n0003"]
WELL = {"part": "done", "matmul_tflops": 100.0, "memory_gb_s": 9.0, "write_mb_s": 50.0, "all_reduce_gb_s": 1.0, "seconds": 3.0}
PEER_LOST = WELL | {"part": "all_reduce", "error": "RuntimeError: did not meet the others"}
NO_GPU = {"part": "device", "error": "UserError: this rank sees no GPU"}


def attempt(folder: Path, *overrides: str, cards: dict[int, dict[str, Any]]) -> RunDir:
    """A run on three nodes of one rank each; ``cards``: those ranks that are not well."""
    run = RunDir(folder / "run")
    common = [
        "cluster=testbed",
        "gpus_per_node=1",
        "train.seq_len=64",
        "train.global_batch_tokens=768",
        "resilience.preflight=true",
    ]
    run.path.mkdir()
    freeze(validate(load([*common, *overrides])), run.config)
    for rank in range(3):
        write_json(run.preflight("7.0") / f"rank-{rank:04d}.json", {"rank": rank} | cards.get(rank, WELL))
    return run


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run.journal) if event["event"] == name]


def test_where_all_are_well_the_run_starts_on_all_and_the_figures_are_journalled(tmp_path: Path) -> None:
    run = attempt(tmp_path, "nodes=3", cards={})
    assert judge(run, PLACE) == GO_ON
    assert not run.ranks_on("7.0").exists()
    (told,) = events(run, "preflight")
    assert (told["sick"], told["problem"], told["matmul_tflops"]["median"]) == ({}, None, 100.0)


def test_a_sick_node_is_named_and_its_run_does_not_start(tmp_path: Path) -> None:
    run = attempt(tmp_path, "nodes=3", cards={0: PEER_LOST, 1: NO_GPU, 2: PEER_LOST})
    assert judge(run, PLACE) == REFUSED
    (blame,) = events(run, "node_blamed")
    words = "rank 1: device: UserError: this rank sees no GPU"
    assert (blame["node"], blame["why"], blame["sure"], blame["evidence"]) == ("n0002", "preflight", True, words)


def test_a_spare_node_takes_the_place_of_a_sick_one(tmp_path: Path) -> None:
    run = attempt(tmp_path, "nodes=2", "spare_nodes=1", cards={0: NO_GPU, 1: PEER_LOST, 2: PEER_LOST})
    assert judge(run, PLACE) == GO_ON
    assert run.ranks_on("7.0").read_text() == "2 n0002 n0001\n"


def test_a_spare_node_that_is_not_needed_has_no_ranks(tmp_path: Path) -> None:
    run = attempt(tmp_path, "nodes=2", "spare_nodes=1", cards={})
    assert judge(run, PLACE) == GO_ON
    assert run.ranks_on("7.0").read_text() == "2 n0001 n0003\n"


def test_an_elastic_run_goes_on_without_the_sick_node_laid_out_for_the_others(tmp_path: Path) -> None:
    run = attempt(tmp_path, "nodes=2..3", cards={2: NO_GPU})
    assert judge(run, PLACE) == GO_ON
    assert run.ranks_on("7.0").read_text() == "2 n0001 n0003\n"
    laid_out = load_frozen(run.attempt_config("7.0"))
    assert (laid_out.nodes, laid_out.layout.dp_shard) == (2, 2)


def test_a_stop_request_meanwhile_is_no_sickness(tmp_path: Path) -> None:
    run = attempt(tmp_path, "nodes=2", "spare_nodes=1", cards={0: {"part": "matmul"}, 1: {"part": "memory"}})
    run.notice("7.0").touch()
    assert judge(run, PLACE) == GO_ON
    assert run.ranks_on("7.0").read_text() == "2 n0001 n0003\n"
    assert events(run, "node_blamed") == []


def test_an_all_reduce_that_fails_among_nodes_that_are_well_blames_nobody(tmp_path: Path) -> None:
    run = attempt(tmp_path, "nodes=3", cards=dict.fromkeys(range(3), PEER_LOST))
    assert judge(run, PLACE) == REFUSED
    assert events(run, "node_blamed") == []
    assert events(run, "preflight")[0]["problem"] == "rank 0: all_reduce: RuntimeError: did not meet the others"


@pytest.mark.parametrize(
    ("card", "words"),
    [
        (None, "rank 1: gave no figures"),
        ({"part": "matmul"}, "rank 1: ended in: matmul"),
        (WELL | {"part": "all_reduce"}, "rank 1: ended in: all_reduce"),
        (WELL | {"matmul_tflops": 60.0}, "rank 1: matmul: 60 TFLOP/s, the median is 100"),
        ({"part": "memory", "error": "MemoryError: memory holds 1"}, "rank 1: memory: MemoryError: memory holds 1"),
        ({"part": "file system", "error": "OSError: [Errno 5]"}, "rank 1: file system: OSError: [Errno 5]"),
    ],
)
def test_what_is_wrong_with_a_node_stands_in_one_line(card: dict[str, Any] | None, words: str) -> None:
    cards = {0: WELL, 1: card, 2: WELL}
    assert sick({rank: one for rank, one in cards.items() if one is not None}, HOSTS, 1, "cuda") == {"n0002": words}


def test_what_fails_on_every_node_is_no_node_s_fault() -> None:
    full = {"part": "file system", "error": "OSError: [Errno 28] No space left on device"}
    assert sick(dict.fromkeys(range(3), full), HOSTS, 1, "cuda") == {}
    assert sick({0: full}, HOSTS[:1], 1, "cuda") == {}
    assert sick({0: NO_GPU}, HOSTS[:1], 1, "cuda") == {"n0001": "rank 0: device: UserError: this rank sees no GPU"}


def test_ranks_on_cpus_that_others_use_too_may_be_much_slower_than_the_median() -> None:
    assert sick({0: WELL, 1: WELL | {"matmul_tflops": 20.0}, 2: WELL}, HOSTS, 1, "cpu") == {}
