"""The keys of hydra-submitit-launcher, and what they become: run's configs, and the lines that sbatch reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.planner.check import prepare
from hpcmoe.runs.estimate import estimate_gpu_hours
from hpcmoe.runs.jobspec import JobSpec, directives, render
from hydra_plugins.hpcmoe_launchers._app_config import app_config

# What submitit_slurm has when nothing is set (hydra-submitit-launcher 1.2.0).
DEFAULTS: dict[str, Any] = {
    "submitit_folder": "/sweep/.submitit/%j", "timeout_min": 60, "cpus_per_task": None, "gpus_per_node": None,
    "tasks_per_node": 1, "mem_gb": None, "nodes": 1, "name": "my_app", "stderr_to_stdout": False, "partition": None,
    "qos": None, "comment": None,
    "constraint": None, "exclude": None, "gres": None, "cpus_per_gpu": None, "gpus_per_task": None, "mem_per_gpu": None,
    "mem_per_cpu": None, "account": None, "signal_delay_s": 120, "max_num_timeout": 0, "additional_parameters": {},
    "array_parallelism": 256, "setup": None,
}  # fmt: skip


def made(scheduler: str = "slurm", **params: Any) -> Config:
    return app_config(scheduler, {**DEFAULTS, **params}, ["python", "task"])


def lines(**params: Any) -> list[str]:
    spec = JobSpec((Path("/r/1"), Path("/r/2")), made(**params), "py", "name", "token", sweep_dir=Path("/sweep"))
    return [line.removeprefix("#SBATCH --") for line in directives(spec)]


def test_the_defaults_are_those_of_submitit_slurm() -> None:
    found = lines()
    assert {"nodes=1", "ntasks-per-node=1", "time=01:00:00", "signal=B:USR1@120", "array=0-1%256"} <= set(found)
    assert not [line for line in found if line.startswith(("gres", "gpus", "mem", "partition", "cpus"))]
    config = made()
    assert (config.runs_command, config.engine.command, config.tasks_per_node) == (True, ["python", "task"], 1)


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"partition": "gpu,long"}, "partition=gpu,long"),
        ({"qos": "high"}, "qos=high"),
        ({"account": "me"}, "account=me"),
        ({"comment": "it's mine"}, "comment='it\\'s mine'"),
        ({"constraint": "a100|h100"}, "constraint='a100|h100'"),
        ({"exclude": "n[01-03]"}, "exclude=n[01-03]"),
        ({"gres": "gpu:a100:2"}, "gres=gpu:a100:2"),
        ({"gpus_per_node": 4}, "gpus-per-node=4"),
        ({"gpus_per_task": 2}, "gpus-per-task=2"),
        ({"cpus_per_gpu": 8}, "cpus-per-gpu=8"),
        ({"mem_per_gpu": "10G"}, "mem-per-gpu=10G"),
        ({"mem_per_cpu": "2G"}, "mem-per-cpu=2G"),
        ({"mem_gb": 12}, "mem=12GB"),
        ({"cpus_per_task": 3}, "cpus-per-task=3"),
        ({"nodes": 2, "tasks_per_node": 4}, "ntasks-per-node=4"),
        ({"timeout_min": 4320}, "time=72:00:00"),
        ({"array_parallelism": 7}, "array=0-1%7"),
        ({"signal_delay_s": 300}, "signal=B:USR1@300"),
        ({"additional_parameters": {"mail-user": "a@b.c", "mail-type": "BEGIN"}}, "mail-user=a@b.c"),
        ({"additional_parameters": {"reservation": "mine"}}, "reservation=mine"),
        ({"additional_parameters": {"exclusive": True}}, "exclusive"),
        ({"additional_parameters": {"exclusive": "user"}}, "exclusive=user"),
        ({"additional_parameters": {"switches": "1@01:00:00"}}, "switches=1@01:00:00"),
        ({"additional_parameters": {"no_requeue": True}}, "no-requeue"),
        ({"additional_parameters": {"time": "0:30:00"}}, "time=0:30:00"),  # submitit fails at the job's end with it
    ],
    ids=str,
)
def test_a_key_reaches_sbatch(params: dict[str, Any], line: str) -> None:
    assert line in lines(**params)


def test_a_warning_that_is_longer_than_the_time_limit_is_shortened() -> None:
    """submitit takes such settings, so that they are no reason to refuse them here."""
    assert "signal=B:USR1@30" in lines(timeout_min=1)
    assert "signal=B:USR1@60" in lines(timeout_min=60, additional_parameters={"time": "2:00"})


def test_time_limits_count_as_submitit_counts_them() -> None:
    assert made().resilience.max_time_limits == 0
    assert made(max_num_timeout=3).resilience.max_time_limits == 3


def test_gpus_are_counted_where_they_are_asked_for() -> None:
    cases: dict[float, dict[str, Any]] = {
        0: {},
        4: {"gpus_per_node": 4},
        12: {"gpus_per_task": 2, "tasks_per_node": 3, "nodes": 2},
        2: {"gres": "gpu:a100:2(S:0)"},
        1: {"gres": "gpu"},
    }
    assert {count: estimate_gpu_hours(made(**params), None) for count, params in cases.items()} == {n: n for n in cases}


def test_setup_lines_come_before_the_task() -> None:
    config = made(setup=["module load cuda"])
    text = render(JobSpec((Path("/r/1"),), config, "py", "name", "token"))
    assert text.index("module load cuda") < text.index("hpcmoe.engine.command")


def test_a_profile_gives_its_environment_and_its_rules_but_no_gpus() -> None:
    config = made(cluster="leonardo", account="me", nodes=100)
    prepare(config)
    assert (config.cluster.name, config.slurm.qos, config.slurm.gres) == ("leonardo", "boost_qos_bprod", None)


def test_any_key_of_hpcmoes_own_may_be_given() -> None:
    config = made(
        "local", hpcmoe={"resilience": {"max_gpu_hours": 3}, "notify": {"mail": "a@b.c"}, "engine": {"stop_signal": "INT"}}
    )
    assert (config.resilience.max_gpu_hours, config.notify.mail, config.engine.stop_signal) == (3, "a@b.c", "INT")
    assert config.engine.command == ["python", "task"]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"timeout_min": 0}, "timeout_min=0 must be above zero"),
        ({"cluster": "leonrado"}, "did you mean 'leonardo'"),
        ({"cluster": "/no/such.yaml"}, "no such file"),
        ({"cluster": "local"}, "hpcmoe_local"),
        ({"cluster": "leonardo"}, "slurm.account"),
        ({"hpcmoe": {"resilence": {"max_failures": 1}}}, "did you mean 'resilience'"),
        ({"hpcmoe": {"resilience": {"max_failures": "many"}}}, "resilience.max_failures"),
        ({"hpcmoe": {"engine": {"command": "x"}}}, "the app's own task"),
        ({"additional_parameters": {"array": "0-3"}}, "array_parallelism"),
        ({"additional_parameters": {"ntasks-per-node": 3}}, "hydra.launcher.tasks_per_node"),
        ({"additional_parameters": {"mail-type": "SOMETIMES"}}, "slurm.mail_type"),
        ({"scheduler": "local", "nodes": 2}, "this one machine"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_line(params: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        made(**params)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
