"""Handing runs and callables to Slurm (played by stand-ins) and to this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcmoe.errors import UserError
from hpcmoe.runs.jobspec import JobSpec
from hpcmoe.slurm.command import SlurmMissing
from hpcmoe.slurm.directives import read_directives
from hpcmoe.slurm.facts import SEPARATOR
from hydra_plugins.hpcmoe_launchers import executor_for
from hydra_plugins.hpcmoe_launchers._slurm_executor import HpcmoeSlurmExecutor
from hydra_plugins.hpcmoe_launchers._watcher import HpcmoeInfoWatcher, HpcmoeJob
from tests.hpcmoe_slurm.fakes import RECORDED, FakeSlurm
from tests.launchers.stage import PATIENCE_S, Stage, config, spec


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.answers("sbatch", "41\n")
    fake.answers("srun")
    fake.runs("scontrol", f'cat "{RECORDED / "show_config.txt"}"')
    return fake


def queue_row(job_id: str, state: str) -> str:
    return SEPARATOR.join([job_id, state, "None", "1", "2", "3", "1", "n1", "me", "name", ""]) + "\n"


def acct_row(job_id: str, state: str) -> str:
    now = int(time.time())
    return SEPARATOR.join([job_id, state, "0:0", str(now), str(now), str(now), "1", "cpu=1", "n1", "name"]) + "\n"


# ---- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_is_submitted_with_its_own_script_and_log_folder(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "abc123"
    ids = executor_for(config("cluster=testbed"), tmp_path).submit_run(spec(config("cluster=testbed"), run))
    assert ids == ["41"]
    script = run / "sbatch" / "attempt.sh"
    assert slurm.calls("sbatch") == [f"--parsable --comment=hpcmoe:abc123-0 {script}"]
    assert os.access(script, os.X_OK)
    assert Path(read_directives(script.read_text())["output"]).parent.is_dir()


def test_an_array_lists_its_runs_and_writes_nothing_into_them(slurm: FakeSlurm, tmp_path: Path) -> None:
    runs = [tmp_path / "runs" / name for name in ("a", "b", "c")]
    cfg = config("cluster=testbed")
    ids = executor_for(cfg, tmp_path).submit_run(spec(cfg, *runs, sweep_dir=tmp_path / "sweep"))
    assert ids == ["41_0", "41_1", "41_2"]
    listed = (tmp_path / "sweep" / "sbatch" / "array-0.txt").read_text().splitlines()
    assert listed == [str(run) for run in runs]
    assert not any(run.exists() for run in runs)


def test_without_slurm_the_error_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing, match="cluster=local"):
        executor_for(config("cluster=testbed"), tmp_path)


def test_an_unknown_scheduler_is_refused(tmp_path: Path) -> None:
    cfg = config("cluster=local")
    cfg.cluster.scheduler = "pbs"
    with pytest.raises(UserError, match="pbs"):
        executor_for(cfg, tmp_path)


def test_a_local_run_outlives_the_process_that_started_it_and_its_terminal(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.play(rank="sleep 2; say survived")
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.launchers.stage import config\n"
        "from hpcmoe.runs.jobspec import JobSpec\n"
        "from hydra_plugins.hpcmoe_launchers import executor_for\n"
        "cfg = config('cluster=local', 'gpus_per_node=1')\n"
        "print(executor_for(cfg, Path(sys.argv[1])).submit_run(JobSpec((Path(sys.argv[1]),), cfg, sys.argv[2], 'n', 't'))[0])\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program, str(stage.run_dir), str(stage.python)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert starter.stdout is not None
    job_id = starter.stdout.readline().strip()  # the line arrives although the job goes on: it does not hold our pipe
    starter.wait(timeout=PATIENCE_S)
    for each in (signal.SIGHUP, signal.SIGTERM):  # what a closing terminal does to what was started from it
        try:
            os.killpg(starter.pid, each)
        except ProcessLookupError:
            break
    deadline = time.monotonic() + PATIENCE_S
    while not any(call.startswith("depart") for call in stage.calls):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert stage.calls[0] == f"arrive {job_id}.0"
    assert "survived" in stage.calls


def test_a_local_run_does_not_inherit_ignored_signals(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.play(rank="say started; while [[ ! -e $HPCMOE_RUN_DIR/attempts/$HPCMOE_ATTEMPT/notice ]]; do sleep 0.1; done")
    cfg = config("cluster=local", "gpus_per_node=1")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        [job_id] = executor_for(cfg, tmp_path).submit_run(JobSpec((stage.run_dir,), cfg, str(stage.python), "n", "t"))
    finally:
        signal.signal(signal.SIGTERM, before)
    pid = int(job_id.removeprefix("local-"))
    while "started" not in stage.calls:
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == 0
    assert stage.calls[-1] == "depart --rc 0 --heard TERM"


# ---- submitit's own API -----------------------------------------------------------------------------------------------


def executor(tmp_path: Path, **parameters: object) -> HpcmoeSlurmExecutor:
    made = HpcmoeSlurmExecutor(tmp_path / "sub it" / "%j")
    made._throttling = 0.0
    made.update_parameters(**parameters)
    return made


def submission(job_folder: Path) -> str:
    return next(job_folder.glob("*_submission.sh")).read_text()


def test_a_callable_goes_through_our_script(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = executor(tmp_path, partition="high", time=7, comment="it's", ntasks_per_node=2, cpus_per_task=3).submit(len, "abc")
    assert isinstance(job, HpcmoeJob)
    assert job.job_id == "41"
    text = submission(job.paths.folder)
    words = read_directives(text)
    assert (words["partition"], words["time"], words["comment"], words["signal"]) == ("high", "7", "it's", "USR2@90")
    assert "wckey" not in words
    assert "export SUBMITIT_EXECUTOR=hpcmoe\n" in text
    assert "--kill-on-bad-exit=1" in text
    assert "--cpus-per-task=3" in text
    assert "-u -m submitit.core._submit" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False, capture_output=True).stderr == ""


def test_an_array_of_callables_keeps_our_class_and_is_one_submission(slurm: FakeSlurm, tmp_path: Path) -> None:
    jobs = executor(tmp_path, array_parallelism=2).map_array(len, ["a", "bb", "ccc"])
    assert [(type(job), job.job_id) for job in jobs] == [(HpcmoeJob, f"41_{task}") for task in range(3)]
    assert len(slurm.calls("sbatch")) == 1
    script = next((tmp_path / "sub it").rglob("submission_file_*.sh"))
    assert read_directives(script.read_text())["array"] == "0-2%2"
    assert all(job.paths.submitted_pickle.exists() for job in jobs)


def test_an_array_beyond_the_site_s_limit_becomes_several(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("scontrol", "MaxArraySize            = 2\n")
    slurm.runs("sbatch", f'echo $((40 + $(wc -l <"{slurm.folder}/sbatch.log")))')
    jobs = executor(tmp_path).map_array(len, ["a"] * 5)
    assert [job.job_id for job in jobs] == ["41_0", "41_1", "42_0", "42_1", "43_0"]


def test_a_number_in_a_site_s_notice_is_not_taken_for_the_job_id(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("sbatch", "after previous job 99\n41;leonardo\n")
    assert executor(tmp_path).submit(len, "abc").job_id == "41"


# ---- submitit's view of jobs ------------------------------------------------------------------------------------------


def watched(slurm: FakeSlurm, *job_ids: str) -> HpcmoeInfoWatcher:
    watcher = HpcmoeInfoWatcher()
    for job_id in job_ids:
        watcher.register_job(job_id)
    return watcher


@pytest.mark.parametrize("state", ["SUSPENDED", "CONFIGURING", "SIGNALING", "SPECIAL_EXIT", "RESIZING", "COMPLETING", "REQUEUED"])
def test_a_job_in_an_unusual_state_is_not_done(slurm: FakeSlurm, state: str) -> None:
    slurm.answers("squeue", queue_row("7", state))
    assert not watched(slurm, "7").is_done("7", mode="force")


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "PREEMPTED", "TIMEOUT", "NODE_FAIL"])
def test_a_job_that_the_controller_calls_ended_is_done(slurm: FakeSlurm, state: str) -> None:
    slurm.answers("squeue", queue_row("7", state))
    assert watched(slurm, "7").is_done("7", mode="force")


def test_an_end_that_only_accounting_tells_is_believed_at_the_second_look(slurm: FakeSlurm) -> None:
    slurm.answers("squeue")
    slurm.answers("sacct", acct_row("7", "PREEMPTED"))
    watcher = watched(slurm, "7")
    assert not watcher.is_done("7", mode="force")
    time.sleep(0.01)
    assert watcher.is_done("7", mode="force")


def test_a_preempted_job_that_waits_again_is_not_done_whatever_accounting_says(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", queue_row("7", "PENDING"))
    slurm.answers("sacct", acct_row("7", "PREEMPTED"))
    watcher = watched(slurm, "7")
    assert not watcher.is_done("7", mode="force")
    time.sleep(0.01)
    assert not watcher.is_done("7", mode="force")


def test_silence_leaves_the_last_known_state(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", queue_row("7", "RUNNING"))
    watcher = watched(slurm, "7")
    assert watcher.get_state("7", mode="force") == "RUNNING"
    slurm.answers("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller", rc=1)
    time.sleep(0.01)
    assert watcher.get_state("7", mode="force") == "RUNNING"
    assert not watcher.is_done("7", mode="cache")


def test_many_jobs_are_asked_about_in_one_call(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", "".join(queue_row(str(n), "RUNNING") for n in range(20)))
    watcher = watched(slurm, *map(str, range(20)))
    watcher.update()
    assert len(slurm.calls("squeue")) == 1
