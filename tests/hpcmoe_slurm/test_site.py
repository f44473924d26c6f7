"""A whole site as a real Slurm 22.05.8 showed it (recorded/), read."""

from __future__ import annotations

import pytest

from hpcmoe.slurm.command import SlurmRejected
from hpcmoe.slurm.site import (
    ACCOUNT_COLUMNS,
    QOS_COLUMNS,
    ask_site,
    gpus_of_gres,
    read_accounts,
    read_partitions,
    read_qos,
    read_shapes,
)
from tests.hpcmoe_slurm.fakes import RECORDED, FakeSlurm


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def test_partitions_have_tiers_a_default_and_their_users() -> None:
    found = {part.facts.name: part for part in read_partitions(recorded("show_partitions.txt"))}
    assert [(name, part.tier, part.default, part.nodes) for name, part in found.items()] == [
        ("high", 10, False, 4),
        ("requeue_grace", 1, True, 4),
        ("cancel_grace", 1, False, 4),
        ("requeue_nograce", 1, False, 4),
    ]
    assert (found["requeue_grace"].facts.preempt_mode, found["requeue_grace"].facts.grace_s) == ("REQUEUE", 8.0)
    assert (found["high"].accounts, found["high"].qos, found["high"].own_qos) == ((), (), None)


def test_a_partition_of_some_accounts_names_them() -> None:
    text = "PartitionName=x\n   AllowGroups=ALL AllowAccounts=a,b AllowQos=q\n   Default=NO QoS=pq\n   PriorityTier=1\n"
    [part] = read_partitions(text)
    assert (part.accounts, part.qos, part.own_qos, part.nodes) == (("a", "b"), ("q",), "pq", None)


def test_node_shapes_with_their_gpus() -> None:
    shapes = read_shapes(recorded("sinfo.txt"))
    assert {(shape.nodes, shape.cpus, shape.mem_mb, shape.gpus, shape.gpu_type) for shape in shapes} == {(4, 8, 65536, 4, "a100")}


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", (0, None)),
        ("gpu:4", (4, None)),
        ("gpu:a100:4(S:0-1)", (4, "a100")),
        ("gpu:gh200:4(S:0-3),nvme:1", (4, "gh200")),
        ("gpu:a100:2,gpu:v100:1", (3, "a100")),
        ("craynetwork:4,gpu:a100:4", (4, "a100")),
        ("gpu", (1, None)),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: tuple[int, str | None]) -> None:
    assert gpus_of_gres(gres) == gpus


def test_qos_with_and_without_limits() -> None:
    [normal] = read_qos(recorded("sacctmgr_qos.txt"))
    assert (normal.name, normal.preempt_mode, normal.max_nodes, normal.max_time_s) == ("normal", "cluster", None, None)
    assert len(QOS_COLUMNS) == 9
    [bprod] = read_qos("bprod|60|00:02:00|requeue|low,idle|1-00:00:00|cpu=8192,node=256|node=64|node=65")
    assert (bprod.grace_s, bprod.preempts, bprod.max_time_s) == (120.0, ("low", "idle"), 86400.0)
    assert (bprod.max_nodes, bprod.min_nodes) == (64, 65)


def test_accounts_of_a_user() -> None:
    assert len(ACCOUNT_COLUMNS) == 4
    assert [(one.account, one.qos) for one in read_accounts(recorded("sacctmgr_assoc.txt"))] == [
        ("hpcmoe", ("normal",)),
        ("root", ("normal",)),
    ]


def test_what_a_user_may_not_ask_is_named_and_the_rest_is_there(slurm: FakeSlurm) -> None:
    slurm.runs(
        "scontrol", f'if [[ $2 == config ]]; then cat "{RECORDED}/show_config.txt"; else cat "{RECORDED}/show_partitions.txt"; fi'
    )
    slurm.runs("sinfo", f'cat "{RECORDED}/sinfo.txt"')
    slurm.answers("sacctmgr", stderr="sacctmgr: error: Access denied", rc=1)
    site = ask_site("me")
    assert site.cluster.version == (22, 5, 8)
    assert len(site.partitions) == len(site.shapes) == 4
    assert site.silent == {"QOS": "Access denied", "accounts": "Access denied"}


def test_without_its_configuration_there_is_no_site(slurm: FakeSlurm) -> None:
    slurm.answers("scontrol", stderr="scontrol: error: no", rc=1)
    with pytest.raises(SlurmRejected):
        ask_site("me")
