"""The job script on a compute node that lacks some of Slurm's commands. With the real ones: tests/slurm/test_job_scripts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcmoe.runs.jobspec import render
from tests.hpcmoe_slurm.fakes import FakeSlurm
from tests.launchers.stage import Stage, config, spec


def test_without_scontrol_the_ranks_meet_on_the_batch_shells_own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(tmp_path / "bin", monkeypatch)
    slurm.answers("scontrol", rc=127)
    slurm.runs("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    stage = Stage(tmp_path)
    stage.play(rank='say "rank meets at $MASTER_ADDR"')
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "localhost"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    script = render(spec(config("cluster=testbed", "cluster.master_addr=null"), stage.run_dir, python=str(stage.python)))
    assert stage.run(script) == 0
    assert stage.calls == ["arrive 7.0", "rank meets at localhost", "depart --rc 0 --heard "]
