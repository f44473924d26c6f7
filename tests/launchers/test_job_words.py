"""How a config becomes sbatch's and srun's words, and which values are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcmoe.errors import UserError
from hpcmoe.runs.jobspec import directives, render, srun_flags
from hpcmoe.slurm.directives import read_directives
from tests.launchers.stage import config, spec

RUN = Path("/runs/abc123")


def words(*overrides: str, **fields: object) -> dict[str, str]:
    return read_directives("\n".join(directives(spec(config("cluster=testbed", *overrides), RUN, **fields))))


@pytest.mark.parametrize(
    ("override", "flag", "value"),
    [
        ("slurm.partition=high", "partition", "high"),
        ("slurm.account=a-b", "account", "a-b"),
        ("slurm.qos=long", "qos", "long"),
        ("slurm.time='1-12:00:00'", "time", "1-12:00:00"),
        ("slurm.gres='gpu:a100:2,tmpfs:10g'", "gres", "gpu:a100:2,tmpfs:10g"),
        ("slurm.constraint='a100&nvme'", "constraint", "a100&nvme"),
        ("slurm.reservation=s_tra", "reservation", "s_tra"),
        ("slurm.exclude='n[0001-0002]'", "exclude", "n[0001-0002]"),
        ("slurm.nodelist=n0003", "nodelist", "n0003"),
        ("slurm.comment='two words'", "comment", "two words"),
        ("slurm.mail_user=me@example.org", "mail-user", "me@example.org"),
        ("slurm.mail_type='END,FAIL'", "mail-type", "END,FAIL"),
        ("slurm.mem=100G", "mem", "100G"),
        ("slurm.cpus_per_task=8", "cpus-per-task", "8"),
        ("slurm.dependency='afterok:7'", "dependency", "afterok:7"),
        ("slurm.begin='now+1hour'", "begin", "now+1hour"),
        ("slurm.nice=0", "nice", "0"),
        ("slurm.wckey=moe", "wckey", "moe"),
        ("slurm.licenses='scratch:1'", "licenses", "scratch:1"),
        ("slurm.extra=['--switches=1@01:00:00']", "switches", "1@01:00:00"),
    ],
)
def test_every_word_of_slurm_that_a_user_sets_reaches_sbatch(override: str, flag: str, value: str) -> None:
    assert words(override)[flag] == value


def test_switches_have_no_value() -> None:
    lines = directives(spec(config("cluster=testbed", "slurm.exclusive=true", "slurm.requeue=false"), RUN))
    assert "#SBATCH --exclusive" in lines
    assert "#SBATCH --no-requeue" in lines
    assert "#SBATCH --requeue" not in lines


def test_the_users_flags_come_last_and_so_win() -> None:
    assert words("slurm.extra=['--ntasks-per-node=3','--signal=B:USR1@600']")["signal"] == "B:USR1@600"


def test_gpus_are_asked_for_where_the_cluster_counts_them() -> None:
    assert words("gpus_per_node=2")["gres"] == "gpu:2"
    assert "gres" not in words("cluster.gres=false")


def test_a_run_s_own_dependency_joins_the_users() -> None:
    assert words("slurm.dependency='afterok:7'", dependency="afterany:9")["dependency"] == "afterok:7,afterany:9"


def test_the_stop_signal_comes_as_early_as_the_config_says() -> None:
    assert words("resilience.stop_lead_s=300")["signal"] == "B:USR1@300"
    assert words("resilience.stop_lead_s=auto")["signal"] == "B:USR1@120", "nothing is measured yet"


def test_cpus_per_task_is_said_to_srun_too() -> None:
    assert "--cpus-per-task=8" in srun_flags(config("cluster=testbed", "slurm.cpus_per_task=8"))


def test_an_elastic_job_asks_for_one_task_a_node_so_that_slurm_may_give_it_the_most() -> None:
    elastic = ["nodes=2..4", "slurm.cpus_per_task=8"]
    asked = words(*elastic)
    assert (asked["nodes"], asked["cpus-per-task"], asked["gres"]) == ("2-4", "32", "gpu:4")
    assert "ntasks-per-node" not in asked
    assert {"--ntasks-per-node=4", "--cpus-per-task=8"} <= set(srun_flags(config("cluster=testbed", *elastic)))
    assert "--cpus-per-task=1" in srun_flags(config("cluster=testbed", "nodes=2..4", "slurm.cpus_per_task=null"))


def test_spare_nodes_are_asked_for_beside_the_others() -> None:
    assert words("nodes=2", "spare_nodes=1")["nodes"] == "3"
    assert words("nodes=1..2", "spare_nodes=1")["nodes"] == "2-3"


def test_srun_kills_all_ranks_when_one_fails() -> None:
    flags = srun_flags(config("cluster=testbed", "resilience.kill_wait_s=45"))
    assert {"--kill-on-bad-exit=1", "--wait=45", "--open-mode=append"} <= set(flags)


def test_a_percent_sign_in_a_path_does_not_become_a_job_id() -> None:
    script = render(spec(config("cluster=testbed"), Path("/runs/100%j")))
    assert read_directives(script)["output"] == "/runs/100%%j/sbatch/slurm-%j.log"


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["slurm.comment='a\nb'"], "--comment"),
        (["slurm.extra=['switches=1']"], "slurm.extra"),
        (["slurm.extra=['--comment=a\nb']"], "slurm.extra"),
        (["slurm.srun_extra=['cpu-bind=cores']"], "slurm.srun_extra"),
        (["+env.A-B=1"], "env"),
        (["cluster.master_addr='{host}\n'"], "cluster.master_addr"),
    ],
)
def test_what_slurm_or_a_shell_cannot_carry_is_refused_in_one_line(overrides: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what) as refused:
        render(spec(config("cluster=testbed", *overrides), RUN))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["/runs/a\nb", "/runs/back\\slash"])
def test_a_run_directory_that_slurm_cannot_name_is_refused(path: str) -> None:
    with pytest.raises(UserError):
        render(spec(config("cluster=testbed"), Path(path)))


def test_this_machine_is_one_node() -> None:
    with pytest.raises(UserError, match="nodes=2"):
        render(spec(config("cluster=local", "nodes=2"), RUN))


def test_the_first_node_s_name_is_filled_into_the_cluster_s_pattern() -> None:
    script = render(spec(config("cluster=testbed", "cluster.master_addr='{host}-ib.$local'"), RUN))
    assert "export MASTER_ADDR=\"$host\"'-ib.$local'\n" in script
