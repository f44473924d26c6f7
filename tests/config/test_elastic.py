"""nodes=LOW..HIGH: what is taken, what is refused, and the config of one attempt."""

from pathlib import Path

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.elastic import on_nodes
from hpcmoe.config.freeze import freeze, load_frozen
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError

BASE = ["cluster=testbed", "train.seq_len=64", "train.global_batch_tokens=3072"]


def test_a_range_stays_one_through_freezing_with_its_layout_open(tmp_path: Path) -> None:
    config = validate(load([*BASE, "nodes=2..4"]))
    freeze(config, tmp_path / "config.yaml")
    frozen = load_frozen(tmp_path / "config.yaml")
    assert (frozen.min_nodes, frozen.nodes, frozen.elastic) == (2, 4, True)
    assert (frozen.layout.dp_shard, frozen.layout.ep, frozen.layout.microbatch) == (None, None, None)


@pytest.mark.parametrize("written", ["nodes=2..2", "nodes=2"])
def test_a_range_of_one_is_a_number(written: str) -> None:
    config = validate(load([*BASE, written]))
    assert (config.nodes, config.elastic, config.layout.dp_shard) == (2, False, 8)


def test_a_config_file_may_say_it_too(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nnodes: 1..3\n")
    config = load([*BASE, "+experiment=mine"], config_dir=str(tmp_path))
    assert (config.min_nodes, config.nodes) == (1, 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nodes=4..2"], "nodes=4..2: write nodes=LOW..HIGH with 0 < LOW <= HIGH"),
        (["nodes=0..2"], "nodes=0..2: write nodes=LOW..HIGH"),
        (["nodes=2..5"], "nodes=5: testbed has 4"),
        (["nodes=2..x"], "nodes=2..x: not a whole number"),
        (["nodes=2", "min_nodes=3"], "min_nodes=3 must be below nodes=2, the most"),
        (["nodes=2..3", "cluster=local"], "cluster=local is this machine alone"),
        (["nodes=2..3", "spare_nodes=1"], "spare_nodes=1 needs resilience.preflight=true"),
        (["nodes=2..4", "spare_nodes=1", "resilience.preflight=true"], "nodes=4 and spare_nodes=1: testbed has 4"),
        (["nodes=1", "cluster=local", "resilience.preflight=true"], "cluster=local is this machine alone"),
        (["nodes=1..2", "layout.tp=3"], "tp=3 = 3 must divide nodes=1 x gpus_per_node=4"),  # no fault of any one count
    ],
)
def test_what_is_no_range_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        validate(load([*BASE, *overrides]))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_counts_without_a_layout_are_named_with_a_range_and_a_batch_that_would_do() -> None:
    with pytest.raises(UserError) as refused:
        validate(load([*BASE, "train.global_batch_tokens=4096", "nodes=1..4"]))
    message = str(refused.value)
    assert message.startswith("nodes=1..4: Slurm may start the run on any number of these, and 3 cannot be used (train.global_")
    assert message.endswith("; nodes=1..2 or train.global_batch_tokens=3072 would do")
    validate(load([*BASE, "train.global_batch_tokens=4096", "nodes=1..2"]))
    validate(load([*BASE, "train.global_batch_tokens=3072", "nodes=1..4"]))


def test_what_the_user_fixed_stays_and_the_shards_follow_the_nodes() -> None:
    config = validate(load([*BASE, "nodes=1..3", "layout.tp=2", "layout.ep=2"]))
    layouts = [validate(on_nodes(config, nodes)).layout for nodes in (1, 2, 3)]
    assert [(layout.tp, layout.ep, layout.dp_shard, layout.dp_replicate) for layout in layouts] == [
        (2, 2, n, 1) for n in (2, 4, 6)
    ]


def test_with_the_shards_given_the_replicas_follow() -> None:
    config = validate(load([*BASE, "nodes=1..3", "layout.dp_shard=4"]))
    layouts = [validate(on_nodes(config, nodes)).layout for nodes in (1, 2, 3)]
    assert [(layout.dp_shard, layout.dp_replicate) for layout in layouts] == [(4, 1), (4, 2), (4, 3)]


def test_an_attempt_s_batch_is_the_run_s() -> None:
    config = validate(load([*BASE, "nodes=1..4"]))
    batches = {validate(on_nodes(config, nodes)).train.global_batch_tokens for nodes in range(1, 5)}
    assert batches == {3072}
