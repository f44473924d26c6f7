"""One submission is one job, whatever happens to Slurm's answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcmoe.slurm import submit
from hpcmoe.slurm.command import SlurmRejected, SlurmUnreachable
from hpcmoe.slurm.facts import SEPARATOR
from tests.hpcmoe_slurm.fakes import FakeSlurm

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
REFUSED = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "RETRY_AFTER_S", 0.01)
    monkeypatch.setattr(submit, "LOOK_AGAIN_AFTER_S", 0.01)
    monkeypatch.setattr(submit, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(submit, "LOOK_FOR_S", 0.5)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "attempt.sh"
    path.write_text("#!/bin/bash\n#SBATCH --comment='my own'\nset -u\n", encoding="utf-8")
    return path


def queue_row(job_id: str, comment: str) -> str:
    return SEPARATOR.join([job_id, "PENDING", "Priority", "1", "N/A", "N/A", "1", "", "me", "hpcmoe-a", comment]) + "\n"


def test_the_token_goes_into_the_comment_behind_the_users_own(slurm: FakeSlurm, script: Path) -> None:
    slurm.answers("sbatch", "41\n")
    assert submit.sbatch(script, ["--dependency=afterany:40"], token="tok-1") == "41"
    assert slurm.calls("sbatch") == [f"--parsable --dependency=afterany:40 --comment=my own hpcmoe:tok-1 {script}"]


def test_the_job_does_not_inherit_what_our_own_commands_need(
    slurm: FakeSlurm, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    slurm.answers("sbatch", "41\n")
    submit.sbatch(script, token="tok-1")
    environment = slurm.environment("sbatch")
    assert environment["LC_ALL"] == "de_DE.UTF-8"
    assert not {name for name in environment if name.startswith("SLURM_")} - {"SLURM_CONF"}


def test_a_job_whose_answer_was_lost_is_adopted_and_not_submitted_again(slurm: FakeSlurm, script: Path) -> None:
    slurm.answers("sbatch", stderr=TIMED_OUT, rc=1)
    slurm.answers("squeue", queue_row("40", "hpcmoe:tok-10") + queue_row("41", "my own hpcmoe:tok-1"))
    assert submit.sbatch(script, token="tok-1") == "41"
    assert len(slurm.calls("sbatch")) == 1


def test_a_lost_request_is_sent_again_once_slurm_has_said_twice_that_there_is_no_such_job(slurm: FakeSlurm, script: Path) -> None:
    slurm.runs("sbatch", f'[[ $(wc -l <"{slurm.folder}/sbatch.log") == 1 ]] && {{ echo "{TIMED_OUT}" >&2; exit 1; }}; echo 42')
    slurm.answers("squeue", queue_row("40", "someone elses"))
    assert submit.sbatch(script, token="tok-1") == "42"
    assert len(slurm.calls("sbatch")) == 2
    assert len(slurm.calls("squeue")) >= 2


def test_nothing_is_sent_again_while_slurm_is_silent(slurm: FakeSlurm, script: Path) -> None:
    slurm.answers("sbatch", stderr=TIMED_OUT, rc=1)
    slurm.answers("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)", rc=1)
    with pytest.raises(SlurmUnreachable):
        submit.sbatch(script, token="tok-1")
    assert len(slurm.calls("sbatch")) == 1


def test_a_controller_that_is_down_is_tried_a_few_times(slurm: FakeSlurm, script: Path) -> None:
    slurm.answers("sbatch", stderr=REFUSED, rc=1)
    with pytest.raises(SlurmUnreachable, match="Unable to contact"):
        submit.sbatch(script, token="tok-1")
    assert len(slurm.calls("sbatch")) == submit.TRIES


def test_a_refusal_is_not_repeated(slurm: FakeSlurm, script: Path) -> None:
    slurm.answers("sbatch", stderr="sbatch: error: invalid partition specified: nono", rc=1)
    with pytest.raises(SlurmRejected, match="invalid partition"):
        submit.sbatch(script, token="tok-1")
    assert len(slurm.calls("sbatch")) == 1


def test_an_array_is_adopted_under_its_own_id() -> None:
    from hpcmoe.slurm.facts import read_queue

    rows = read_queue(queue_row("50_[0-2]", "hpcmoe:tok-1") + queue_row("51", "hpcmoe:tok-2"))
    assert submit.job_with_token("tok-1", rows) == "50"
