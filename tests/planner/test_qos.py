"""Queues by node count and time limit, in each site's own units."""

from __future__ import annotations

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.planner import qos


def on(cluster: str, nodes: int, *overrides: str) -> Config:
    return load([f"cluster={cluster}", f"nodes={nodes}", *overrides])


def choose(config: Config) -> qos.Queue:
    return qos.choose(config.cluster, config.slurm, config.nodes)


@pytest.mark.parametrize(
    ("nodes", "time", "expected"),
    [
        (1, "24:00:00", "normal"),
        (64, "24:00:00", "normal"),
        (65, "24:00:00", "boost_qos_bprod"),
        (128, "24:00:00", "boost_qos_bprod"),
        (256, "24:00:00", "boost_qos_bprod"),
        (8, "2-00:00:00", "boost_qos_lprod"),
    ],
)
def test_leonardo_chooses_the_qos_for_the_size_and_the_time(nodes: int, time: str, expected: str) -> None:
    queue = choose(on("leonardo", nodes, f"slurm.time='{time}'"))
    assert (queue.partition, queue.qos, queue.time) == ("boost_usr_prod", expected, time)


def test_65_nodes_with_a_64_node_qos_is_refused_with_the_rule_and_the_cure() -> None:
    with pytest.raises(UserError, match=r"normal takes at most 64 nodes; slurm.qos=boost_qos_bprod would take it"):
        choose(on("leonardo", 65, "slurm.qos=normal"))


def test_what_no_qos_takes_is_refused_with_every_rule() -> None:
    with pytest.raises(UserError, match=r"nodes=300 .* boost_qos_bprod takes at most 256 nodes \(full nodes only\)"):
        choose(on("leonardo", 300))


def test_limits_in_cores_are_counted_in_cores() -> None:
    assert choose(on("marenostrum5", 100)).qos == "acc_ehpc"
    with pytest.raises(UserError, match=r"acc_ehpc takes at most 8000 cores, and 101 nodes have 8080"):
        choose(on("marenostrum5", 101))


def test_limits_in_node_minutes_are_counted_in_node_minutes() -> None:
    assert choose(on("alps", 2, "slurm.partition=debug", "slurm.time='00:45:00'")).partition == "debug"
    with pytest.raises(UserError, match="90 node-minutes"):
        choose(on("alps", 2, "slurm.partition=debug", "slurm.time='01:00:00'"))


def test_an_unknown_qos_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'boost_qos_bprod'"):
        choose(on("leonardo", 65, "slurm.qos=boost_qos_bprot"))


def test_a_partition_without_rules_on_record_is_left_to_slurm() -> None:
    assert choose(on("jupiter", 2, "slurm.partition=mine")).partition == "mine"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("1:30", 90), ("24:00:00", 86400), ("2-0", 172800), ("1-2:30", 95400), ("4-00:00:00", 345600)],
)
def test_slurm_times(text: str, expected: float) -> None:
    assert qos.seconds(text) == expected
