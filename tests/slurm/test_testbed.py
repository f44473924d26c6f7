"""The testbed is a real Slurm: its jobs start, meet across nodes, are preempted; and it leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm import testbed_cluster
from tests.slurm.testbed_client import Testbed
from tests.slurm.testbed_config import KILL_WAIT_S, NODE_NAMES, new_settings, slurm_conf
from tests.slurm.testbed_processes import job_processes

pytestmark = pytest.mark.timeout(600)
CLI = Path(__file__).with_name("testbed.py")


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(CLI), *words], capture_output=True, text=True, cwd="/")


def test_a_step_of_an_ordinary_user_spans_two_nodes_with_four_gpus_each(testbed: Testbed, ordinary_user: str) -> None:
    who = 'echo "$(id -un) $SLURMD_NODENAME $SLURM_LOCALID $SLURM_GPUS_ON_NODE"'
    done = testbed.run(["srun", "-N2", "--ntasks-per-node=4", "--gpus-per-node=4", "bash", "-c", who], ordinary_user)
    assert sorted(done.stdout.splitlines()) == [
        f"{ordinary_user} {node} {task} 4" for node in NODE_NAMES[:2] for task in range(4)
    ], done.stderr


def test_accounting_knows_a_finished_job_and_its_gpus(testbed: Testbed) -> None:
    job = testbed.sbatch("#!/bin/sh\nexit 7\n", "--gpus-per-node=2", "-o/dev/null")
    testbed.wait_for(job, {"FAILED"})
    row = ""
    for _ in range(500):  # slurmdbd hears of a job's end a little later
        row = testbed.run(["sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode,AllocTRES"]).stdout.strip()
        if row.startswith("FAILED"):
            break
        time.sleep(0.2)
    assert row == "FAILED|7:0|billing=1,cpu=1,gres/gpu=2,node=1"


def test_a_job_of_higher_priority_preempts_and_the_victim_comes_back(testbed: Testbed, ordinary_user: str) -> None:
    victim = testbed.sbatch(
        "#!/bin/sh\nsleep 100\n", "-N4", "--exclusive", "-prequeue_nograce", "-o/dev/null", user=ordinary_user
    )
    testbed.wait_for(victim, {"RUNNING"})
    other = testbed.sbatch("#!/bin/sh\nsleep 1\n", "-N4", "--exclusive", "-phigh", "-o/dev/null")
    testbed.wait_for(other, {"COMPLETED"})
    testbed.wait_for(victim, {"RUNNING"})
    assert testbed.show(victim)["Restarts"] == "1"
    testbed.run(["scancel", victim], ordinary_user)
    testbed.wait_for(victim, {"CANCELLED"})


@pytest.mark.parametrize(("user_signal", "heard"), [(True, "USR1"), (False, "TERM")])
def test_the_user_signal_switch_decides_what_a_preempted_batch_shell_hears(
    testbed: Testbed, user_signal: bool, heard: str
) -> None:
    testbed.set_user_signal(user_signal)
    log = testbed.shared_folder("heard") / "log"
    script = '#!/bin/bash\nfor s in USR1 TERM; do trap "echo heard $s; exit" $s; done\necho ready\nwhile :; do sleep 0.1; done\n'
    job = testbed.sbatch(script, "-N4", "--exclusive", "-pcancel_grace", "--signal=B:USR1@30", f"-o{log}")
    while not log.exists() or "ready" not in log.read_text():
        time.sleep(0.1)
    other = testbed.sbatch("#!/bin/sh\n", "-N4", "--exclusive", "-phigh", "-o/dev/null")
    testbed.wait_for(other, {"COMPLETED"})
    assert [line for line in log.read_text().splitlines() if line.startswith("heard")] == [f"heard {heard}"]
    assert testbed.state(job) in {"COMPLETED", "PREEMPTED"}


def test_down_leaves_no_process_not_even_of_jobs_that_ignore_signals_and_left_their_session(testbed: Testbed) -> None:
    root = testbed.root.with_name(f"{testbed.root.name}-2")  # beside the first, which must not notice
    assert cli("up", str(root)).returncode == 0
    try:
        assert cli("up", str(root)).stdout == f"a testbed is up already in {root}\n"
        record = testbed_cluster.load(root)
        assert record is not None
        second = Testbed(root)
        job = second.sbatch(
            "#!/bin/bash\ntrap '' TERM\nsetsid sleep 98 &\nsrun sh -c \"trap '' TERM; setsid sleep 99 & sleep 97\"\nsleep 96\n",
            "-o/dev/null",
        )
        second.wait_for(job, {"RUNNING"})
        while len(job_processes(root, record.settings.cluster)) < 8:  # 2 stepds, script, srun twice, step shell, sleeps
            time.sleep(0.1)
        assert cli("status", str(root)).returncode == 0
    finally:
        assert cli("down", str(root)).returncode == 0
    assert job_processes(root, record.settings.cluster) == []
    assert record.dead() == [process.name for process in record.processes]
    assert cli("status", str(root)).returncode == 1
    assert cli("status", str(testbed.root)).returncode == 0
    shutil.rmtree(root)


def test_a_folder_that_is_no_testbed_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    done = cli("up", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("slurm-wlm 22.05.8", "SlurmctldParameters=preempt_send_user_signal"),
        ("slurm 24.11.3", "PreemptParameters=send_user_signal"),
    ],
)
def test_the_user_signal_option_is_written_as_each_version_reads_it(version: str, line: str) -> None:
    settings = new_settings(Path("/tmp/x"), version, user_signal=True, users=())
    assert line in slurm_conf(settings).splitlines()
    assert line not in slurm_conf(settings.with_user_signal(False))
    assert f"KillWait={KILL_WAIT_S}" in slurm_conf(settings)
