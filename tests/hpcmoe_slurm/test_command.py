"""Running Slurm's commands: silence is told from a no, and a surrounding job does not leak in."""

from __future__ import annotations

import subprocess
import time

import pytest

from hpcmoe.errors import UserError
from hpcmoe.slurm.command import SlurmMissing, SlurmRejected, SlurmUnreachable, reason_line, run, run_or_reject, scrubbed
from tests.hpcmoe_slurm.fakes import FakeSlurm


@pytest.mark.parametrize(
    ("stderr", "maybe_done"),
    [
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("scontrol: error: Unexpected message received", True),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", False),
        ("sacct: error: Problem talking to the database: Connection refused", False),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", False),
        ("squeue: error: If munged is up, restart with --num-threads=10", False),
    ],
)
def test_no_answer_is_unreachable(slurm: FakeSlurm, stderr: str, maybe_done: bool) -> None:
    slurm.answers("squeue", stderr=stderr, rc=1)
    with pytest.raises(SlurmUnreachable) as silence:
        run(["squeue"])
    assert silence.value.maybe_done is maybe_done


def test_an_answer_that_takes_too_long_is_no_answer_and_its_process_is_ended(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", sleep_s=100)
    started = time.monotonic()
    with pytest.raises(SlurmUnreachable, match="squeue did not answer within 0 s"):
        run(["squeue"], timeout_s=0.3)
    assert time.monotonic() - started < 60


def test_a_ctrl_c_at_the_moment_of_a_commands_end_stays_a_ctrl_c(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        told = False

        def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
            answer = super().communicate(input, timeout)
            if not self.told:
                self.told = True
                raise KeyboardInterrupt
            return answer

    slurm.answers("squeue", "\n")
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["squeue"])


def test_a_refusal_is_rejected_with_slurms_own_line(slurm: FakeSlurm) -> None:
    slurm.answers("sbatch", stderr="sbatch: a notice\nsbatch: error: invalid partition specified: nono\n", rc=1)
    with pytest.raises(SlurmRejected, match=r"^invalid partition specified: nono$"):
        run_or_reject(["sbatch"])


def test_a_machine_without_slurm_says_so_in_one_line(slurm: FakeSlurm) -> None:
    with pytest.raises(SlurmMissing, match="not a Slurm cluster"):
        run(["hpcmoe-no-such-command"])


def test_slurms_errors_are_for_users() -> None:
    assert all(issubclass(kind, UserError) for kind in (SlurmMissing, SlurmRejected, SlurmUnreachable))


def test_a_surrounding_job_does_not_leak_and_the_users_own_things_stay() -> None:
    inside = {
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_CPU": "100",
        "SLURM_CPU_BIND": "quiet",
        "SBATCH_PARTITION": "high",
        "SRUN_CPUS_PER_TASK": "4",
        "PMIX_RANK": "3",
        "OMPI_COMM_WORLD_RANK": "3",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "HPCMOE_ATTEMPT": "7.0",
    }
    own = {
        "HOME": "/home/me",
        "PATH": "/venv/bin",
        "VIRTUAL_ENV": "/venv",
        "HPCMOE_RUNS": "/runs",
        "SLURM_CONF": "/etc/slurm.conf",
    }
    assert scrubbed(inside | own) == own


def test_commands_run_in_plain_english_with_epoch_times(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    slurm.answers("squeue")
    run(["squeue"])
    environment = slurm.environment("squeue")
    assert (environment["LC_ALL"], environment["SLURM_TIME_FORMAT"], environment["SLURM_BITSTR_LEN"]) == ("C", "%s", "0")


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account\n", "Batch job submission failed: Invalid account"),
        ("sbatch: lua: a notice\nsbatch: error: one\nsbatch: error: two\n", "two"),
        ("something else\n", "something else"),
        ("", "no reason given"),
    ],
)
def test_the_reason_is_one_line(stderr: str, line: str) -> None:
    assert reason_line(stderr) == line
