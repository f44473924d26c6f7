"""What a site means for a run, in words; sites are a recorded one with one thing changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcmoe.slurm.facts import read_cluster
from hpcmoe.slurm.parse import parse_config
from hpcmoe.slurm.probe import Asks, Finding, findings
from hpcmoe.slurm.site import Qos, Site, read_accounts, read_partitions, read_qos, read_shapes
from tests.hpcmoe_slurm.test_site import recorded


def site(
    accounts: str | None = None, qos: tuple[Qos, ...] | None = None, silent: dict[str, str] | None = None, **config: str
) -> Site:
    """The recorded testbed, whose slurm.conf has ``config`` instead."""
    text = recorded("show_config.txt") + "".join(f"{key} = {value}\n" for key, value in config.items())
    return Site(
        cluster=read_cluster(text),
        config=parse_config(text),
        partitions=read_partitions(recorded("show_partitions.txt")),
        shapes=read_shapes(recorded("sinfo.txt")),
        qos=read_qos(recorded("sacctmgr_qos.txt")) if qos is None else qos,
        accounts=read_accounts(recorded("sacctmgr_assoc.txt") if accounts is None else accounts),
        silent=silent or {},
    )


def about(topic: str, where: Site, **asks: Any) -> list[Finding]:
    return [one for one in findings(where, Asks(user="me", **asks)) if one.topic == topic]


def said(topic: str, where: Site, **asks: Any) -> str:
    return "\n".join(f"{one.level}: {one.says}" for one in about(topic, where, **asks))


def test_a_preempted_run_is_told_what_it_hears_and_how_long_it_has() -> None:
    text = said("preemption", site())
    assert "jobs of high preempt a run (REQUEUE): SIGTERM in its ranks, then 8 s of grace, then 6 s until SIGKILL" in text
    assert "unknown: whether a step and a save fit into 14 s is not known" in text


def test_the_user_signal_replaces_the_first_term() -> None:
    assert "SIGUSR1 in its job script, then 8 s" in said("preemption", site(SlurmctldParameters="preempt_send_user_signal"))


def test_without_grace_the_kill_wait_is_all_there_is() -> None:
    text = said("preemption", site(), partition="requeue_nograce", save_s=2.0, step_s=1.0)
    assert "without grace time: SIGTERM, then 6 s (KillWait) until SIGKILL" in text
    assert "ok: the longest step and save of the runs here took 3.0 s, and 6 s are left to them" in text


@pytest.mark.parametrize(("save_s", "level"), [(1.0, "ok"), (9.5, "warn"), (13.0, "warn"), (20.0, "bad")])
def test_a_save_that_does_not_fit_is_bad(save_s: float, level: str) -> None:
    assert about("preemption", site(), save_s=save_s, step_s=0.5)[-1].level == level


@pytest.mark.parametrize(
    ("where", "partition"), [(site(), "high"), (site(PreemptType="preempt/none"), None), (site(PreemptType="(null)"), None)]
)
def test_where_nothing_preempts_that_is_said(where: Site, partition: str | None) -> None:
    assert said("preemption", where, partition=partition).startswith("ok: nothing preempts a run here")


def test_preemption_by_qos_goes_by_the_qos_of_the_job() -> None:
    low = Qos("low", 1, 60.0, "cluster", (), None, None, None)
    high = Qos("high", 9, 0.0, "cluster", ("low",), None, None, None)
    where = site(qos=(low, high), accounts="a||low,high|low\n", PreemptType="preempt/qos", PreemptMode="CANCEL")
    assert "jobs with QOS high preempt a run (CANCEL): SIGTERM in its ranks, then 60 s of grace" in said("preemption", where)
    assert "nothing preempts" in said("preemption", where, qos="high")
    unsure = site(qos=(low, high), accounts="a||low,high|\n", PreemptType="preempt/qos")
    assert said("preemption", unsure).startswith("unknown: preempt/qos, and the QOS of your jobs is not known")


def test_a_suspended_run_loses_nothing() -> None:
    where = site(PreemptMode="GANG,SUSPEND", PreemptType="preempt/qos", qos=(), accounts="")
    low = Qos("low", 1, 0.0, "cluster", (), None, None, None)
    where = replace(where, qos=(low, replace(low, name="high", preempts=("low",))), accounts=read_accounts("a||low|low\n"))
    assert "it goes on later where it stood" in said("preemption", where)


@pytest.mark.parametrize(
    ("config", "asks", "words"),
    [
        ({}, {}, "ok: a run requeues itself; Slurm holds it for 6 s"),
        ({"JobRequeue": "0"}, {}, "warn: JobRequeue=0"),
        ({}, {"requeue": False}, "warn: slurm.requeue=false"),
    ],
)
def test_how_a_run_comes_back(config: dict[str, Any], asks: dict[str, Any], words: str) -> None:
    assert words in said("requeue", site(**config), **asks)


def test_a_partition_that_is_not_there_is_bad_and_the_others_are_named() -> None:
    [finding] = about("partition", site(), partition="boost")
    assert (finding.level, finding.says) == (
        "bad",
        "there is no partition 'boost'; there are high, requeue_grace*, cancel_grace, requeue_nograce",
    )


@pytest.mark.parametrize(("enforced", "words"), [("NO", "taken and waits for ever"), ("ANY", "sbatch refuses it")])
def test_a_time_above_the_partition_s_limit_is_bad_as_slurm_would_treat_it(enforced: str, words: str) -> None:
    assert words in said("time", site(EnforcePartLimits=enforced), time="2-00:00:00")
    assert about("time", site(EnforcePartLimits=enforced), time="12:00:00") == []


def test_accounts_and_qos_that_are_not_yours_are_bad() -> None:
    assert "bad: slurm.account=x is none of yours: hpcmoe, root" in said("account", site(), account="x")
    assert "bad: slurm.qos=x is none of yours: normal" in said("qos", site(), qos="x")
    assert "bad: user me has no account; jobs are refused" in said(
        "account", site(accounts="", AccountingStorageEnforce="associations,limits,qos")
    )
    assert "ok: user me has no account, and none is needed here" in said("account", site(accounts=""))


def test_what_could_not_be_asked_is_unknown_and_nothing_is_concluded_from_it() -> None:
    where = site(accounts="", silent={"accounts": "Access denied"})
    assert "unknown: accounts could not be asked: Access denied" in said("slurm", where)
    assert about("account", where) == []


def test_no_accounting_a_short_memory_and_hidden_jobs_are_said() -> None:
    where = site(AccountingStorageType="accounting_storage/none", MinJobAge="10 sec", PrivateData="jobs,usage")
    assert said("accounting", where).count("warn: ") == 2
    assert "no place in the queue" in said("queue", where)


def test_a_lead_time_that_is_shorter_than_a_save_is_bad() -> None:
    assert "the time limit would cut a save" in said("time", site(), save_s=200.0, time="1:00:00", stop_lead_s=120.0)


def test_an_older_slurm_is_not_vouched_for() -> None:
    assert "unknown: Slurm 20.11.9" in said("slurm", site(SLURM_VERSION="20.11.9"))
    assert "ok: Slurm 22.05.8" in said("slurm", site())
