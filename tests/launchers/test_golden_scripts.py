"""Each profile's job script, word for word. After a wanted change: HPCMOE_REGENERATE_GOLDEN=1 pytest, and read the diff."""

import os
import subprocess
from pathlib import Path

import pytest

from hpcmoe.runs.jobspec import JobSpec, render
from tests.launchers.stage import config, spec

GOLDEN = Path(__file__).parent / "golden"
RUN = Path("/scratch/me/runs/abc123")

SPECS: dict[str, JobSpec] = {
    "local": spec(config("cluster=local"), RUN),
    "testbed": spec(config("cluster=testbed", "nodes=2", "slurm.partition=requeue_grace"), RUN),
    "leonardo": spec(
        config(
            "cluster=leonardo",
            "nodes=16",
            "slurm.account=IscrB_MoE",
            "slurm.qos=boost_qos_dbg",
            "slurm.time='00:30:00'",
            r"slurm.comment='it\'s mine'",
            "slurm.mail_user=me@example.org",
            "slurm.mail_type=END",
            "slurm.exclude='lrdn[0001-0003]'",
            "slurm.exclusive=true",
            "slurm.extra=['--switches=1@01:00:00']",
            "slurm.srun_extra=['--cpu-bind=cores']",
            "cluster.setup=['module load cuda']",
            "cluster.master_addr='{host}-ib'",
            "+env.WANDB_MODE=offline",
        ),
        RUN,
    ),
    "elastic": spec(
        config(
            "cluster=testbed",
            "nodes=2..3",
            "spare_nodes=1",
            "resilience.preflight=true",
            "slurm.partition=requeue_grace",
        ),
        RUN,
    ),
    "command": spec(
        config("cluster=testbed", "nodes=2", "engine=command", "engine.command=[torchrun,train.py]", "engine.tasks_per_node=1"),
        RUN,
    ),
    "array": spec(
        config("cluster=testbed"),
        *(RUN.parent / name for name in ("abc123", "bcd234", "cde345")),
        job_name="hpcmoe-20261130-120000",
        sweep_dir=RUN.parent / "sweeps" / "20261130-120000",
        at_once=2,
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_script_is_the_golden_one(name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    script = render(SPECS[name])
    if os.environ.get("HPCMOE_REGENERATE_GOLDEN"):
        path.write_text(script, encoding="utf-8")
    assert script == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SPECS)
def test_bash_accepts_the_golden_script(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(GOLDEN / f"{name}.sh")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
