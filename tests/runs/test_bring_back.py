"""A run that nobody is left to bring back is submitted once, however many look after it and wherever one of them is killed."""

from __future__ import annotations

import errno
import json
import os
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.freeze import freeze
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.runs.bring_back import Deed, help_on
from hpcmoe.runs.control import resume
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.lifecycle import ORPHAN_S
from hpcmoe.runs.observe import observe
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import read_record, result_state
from hpcmoe.slurm.facts import SEPARATOR
from tests.hpcmoe_slurm.fakes import FakeSlurm


def row(job_id: str, state: str, comment: str = "", reason: str = "None") -> str:
    words = [job_id, state, reason, str(int(time.time())), "N/A", "N/A", "1", "n1", "me", "hpcmoe", comment]
    return SEPARATOR.join(words) + "\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Job 7 has failed; sbatch takes a moment and gives 41, 42, ..."""
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.answers("squeue", row("7", "FAILED"))
    fake.answers("sacct")
    fake.runs("sbatch", f'n=$(wc -l <"{fake.folder}/sbatch.log"); sleep 0.3; echo $((40 + n))')
    monkeypatch.setattr("hpcmoe.runs.bring_back.SECOND_LOOK_S", 0.01)
    monkeypatch.setattr("hpcmoe.slurm.submit.LOOK_AGAIN_AFTER_S", 0.01)
    monkeypatch.setattr("hpcmoe.slurm.submit.LOOK_EVERY_S", 0.02)
    return fake


def stopped_run(folder: Path, *overrides: str, job: str = "7") -> RunDir:
    """Its job has started an attempt, and there is no more of it."""
    run = RunDir(folder / "runs" / f"run{job}")
    (run.path / "sbatch").mkdir(parents=True)
    run.control.mkdir()
    freeze(validate(load(["cluster=testbed", *overrides])), run.config)
    journal = Journal(run.journal)
    journal.append("planned", run_id=run.run_id, scheduler="slurm", steps=60)
    journal.append("submitting", token=f"{run.run_id}-0", how="submit", writer="x:1:1:a")
    journal.append("submitted", job_id=job, how="submit")
    Journal(run.journal, f"{job}.0").append("attempt_started", job_id=job, restart=0, nodes=1, gpus=4)
    return run


def help_it(run: RunDir) -> list[Deed]:
    deeds: list[Deed] = []
    help_on(observe([read_record(run)])[0], deeds.append)
    return deeds


def told(run: RunDir, *names: str) -> list[tuple[str, Any]]:
    return [(e["event"], e.get("job_id")) for e in read_journal(run.journal) if e["event"] in names and e.get("how") != "submit"]


def test_it_is_submitted_again_with_a_token_of_its_own_and_the_journal_says_by_whom(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    deed = help_it(run)[0]
    assert (deed["did"], deed["job_id"]) == ("submitted", "41")
    assert "--comment=hpcmoe:run7-1" in slurm.calls("sbatch")[0]
    assert read_record(run).attempts[0].cause == "unknown"  # accounting is silent
    assert [event["how"] for event in read_journal(run.journal) if event["event"] == "submitted"] == ["submit", "supervisor"]
    slurm.answers("squeue", row("41", "PENDING"))
    assert help_it(run) == []
    assert len(slurm.calls("sbatch")) == 1


@pytest.mark.parametrize("locks", [True, False])
def test_of_several_that_look_at_once_one_submits_also_where_files_cannot_be_locked(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    run = stopped_run(tmp_path)
    seen = observe([read_record(run)])[0]
    if not locks:
        monkeypatch.setattr("hpcmoe.locks._locked", lambda fd, deadline: True)
    crowd = [threading.Thread(target=help_on, args=(seen, lambda deed: None)) for _ in range(4)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert len(slurm.calls("sbatch")) == 1
    assert told(run, "submitted") == [("submitted", "41")]


def test_a_job_that_a_killed_supervisor_left_behind_is_adopted(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    dead = f"{os.uname().nodename}:999999999:1:a"
    Journal(run.journal).append("submitting", token="run7-1", how="supervisor", writer=dead)
    slurm.answers("squeue", row("7", "FAILED") + row("40", "PENDING", "mine hpcmoe:run7-1"))
    assert help_it(run)[0]["job_id"] == "40"
    assert slurm.calls("sbatch") == []


def test_a_supervisor_whose_request_got_no_answer_looks_for_the_job_in_its_next_round(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped_run(tmp_path)
    monkeypatch.setattr("hpcmoe.slurm.submit.RETRY_AFTER_S", 0.01)
    slurm.answers("sbatch", stderr="sbatch: error: Unable to contact slurm controller (connect failure)", rc=1)
    assert help_it(run)[0]["did"] == "not_submitted"
    tries = len(slurm.calls("sbatch"))
    slurm.answers("squeue", row("7", "FAILED") + row("40", "PENDING", "hpcmoe:run7-1"))
    assert help_it(run)[0]["job_id"] == "40"
    assert len(slurm.calls("sbatch")) == tries


@pytest.mark.parametrize(("state", "submitted"), [("CANCELLED", ["40", "41"]), ("PENDING", ["40"])])
def test_a_resume_that_finds_the_job_of_a_killed_one_submits_another_where_that_is_over(
    slurm: FakeSlurm, tmp_path: Path, state: str, submitted: list[str]
) -> None:
    run = stopped_run(tmp_path)
    Journal(run.journal).append("submitting", token="run7-1", how="resume", writer=f"{os.uname().nodename}:999999999:1:a")
    slurm.answers("squeue", row("7", "FAILED") + row("40", state, "hpcmoe:run7-1"))
    assert resume(run) == submitted[-1]
    assert told(run, "submitted") == [("submitted", job_id) for job_id in submitted]
    assert ["--comment=hpcmoe:run7-2" in call for call in slurm.calls("sbatch")] == [True] * (len(submitted) - 1)


def test_a_resume_that_finds_no_job_of_a_killed_one_submits_once(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    Journal(run.journal).append("submitting", token="run7-1", how="resume", writer=f"{os.uname().nodename}:999999999:1:a")
    slurm.answers("squeue", row("7", "FAILED") + row("41", "FAILED"))  # over at once
    assert resume(run) == "41"
    assert len(slurm.calls("sbatch")) == 1


def test_a_successor_that_the_job_submitted_and_could_not_journal_is_adopted(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    Journal(run.journal, "7.0").append("submitting", token="run7-1", how="successor", writer="n1:12:34:a")
    slurm.answers("squeue", row("7", "FAILED") + row("40", "PENDING", "hpcmoe:run7-1"))
    assert help_it(run)[0]["job_id"] == "40"


def test_a_submission_that_left_no_job_behind_is_made_again_under_the_same_token(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    Journal(run.journal).append("submitting", token="run7-1", how="supervisor", writer=f"{os.uname().nodename}:999999999:1:a")
    assert help_it(run)[0]["job_id"] == "41"
    assert "--comment=hpcmoe:run7-1" in slurm.calls("sbatch")[0]


@pytest.mark.parametrize(("part", "submitted"), [("job_spec", False), ("journal_submitted", True)])
def test_a_supervisor_whose_disk_was_full_in_the_middle_of_a_submission_goes_on_with_it_in_its_next_round(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, submitted: bool
) -> None:
    run = stopped_run(tmp_path)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(f"hpcmoe.runs.create.{part}", full)
        with pytest.raises(OSError, match="No space left"):
            help_it(run)
    slurm.answers("squeue", row("7", "FAILED") + (row("41", "PENDING", "hpcmoe:run7-1") if submitted else ""))
    assert help_it(run)[0]["job_id"] == "41"
    assert len(slurm.calls("sbatch")) == 1
    assert told(run, "submitted") == [("submitted", "41")]


def test_while_another_host_submits_it_it_is_left_alone(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    Journal(run.journal).append("submitting", token="run7-1", how="supervisor", writer="login9:12:34:a")
    assert help_it(run) == []
    with pytest.raises(UserError, match="being submitted by another process"):
        resume(run)
    assert slurm.calls("sbatch") == []


ANOTHER_HOST_S = ORPHAN_S + 10.0  # ago


def begun_elsewhere(run: RunDir) -> None:
    intent = {"event": "submitting", "attempt": None, "token": "run7-1", "how": "supervisor", "writer": "login9:12:34:a"}
    with run.journal.open("a") as journal:
        journal.write(json.dumps({"t": time.time() - ANOTHER_HOST_S, **intent}) + "\n")


def test_what_another_host_left_begun_is_made_again_once_queue_and_accounting_know_no_job_of_it(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    run = stopped_run(tmp_path)
    begun_elsewhere(run)
    slurm.answers("scontrol", "MessageTimeout          = 1 sec\n")
    assert help_it(run)[0]["job_id"] == "41"
    assert "--comment=hpcmoe:run7-1" in slurm.calls("sbatch")[0]
    assert sum("SubmitLine" in call for call in slurm.calls("sacct")) >= 2


def test_while_accounting_is_silent_nobody_can_say_what_became_of_it(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    begun_elsewhere(run)
    slurm.answers("scontrol", "MessageTimeout          = 1 sec\n")
    slurm.runs("sacct", 'case "$*" in *SubmitLine*) echo "sacct: error: Problem talking to the database" >&2; exit 1;; esac')
    assert help_it(run) == []
    with pytest.raises(UserError, match="being submitted by another process"):
        resume(run)
    assert slurm.calls("sbatch") == []


def test_a_job_that_the_controller_has_forgotten_is_found_in_accounting_and_adopted(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    begun_elsewhere(run)
    slurm.answers("scontrol", "MessageTimeout          = 1 sec\n")
    line = SEPARATOR.join(["40", "sbatch --parsable --comment=mine hpcmoe:run7-1 /runs/run7/sbatch/attempt.sh"])
    other = SEPARATOR.join(["39", "sbatch --parsable --comment=hpcmoe:run7-10 /runs/run7/sbatch/attempt.sh"])
    slurm.runs("sacct", f"case \"$*\" in *SubmitLine*) printf '%s\\n' {shlex.quote(other)} {shlex.quote(line)};; esac")
    assert help_it(run)[0]["job_id"] == "40"
    assert slurm.calls("sbatch") == []


def test_a_job_that_only_passes_through_an_end_on_its_way_back_is_left_alone(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped_run(tmp_path)
    slurm.answers("squeue", row("7", "NODE_FAIL"))
    monkeypatch.setattr("hpcmoe.runs.bring_back.time.sleep", lambda seconds: slurm.answers("squeue", row("7", "PENDING")))
    assert help_it(run) == []
    assert slurm.calls("sbatch") == []


def test_a_task_of_an_array_comes_back_as_a_job_of_its_own(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path, job="7_3")
    slurm.answers("squeue", row("7_3", "NODE_FAIL") + row("7_2", "RUNNING"))
    assert help_it(run)[0]["job_id"] == "41"
    assert str(run.script) in slurm.calls("sbatch")[0]


def test_a_task_of_an_array_whose_answer_was_lost_is_found_in_it(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    dead = f"{os.uname().nodename}:999999999:1:a"
    Journal(run.journal).append("submitting", token="other-0", how="sweep", task=2, writer=dead)
    slurm.answers("squeue", row("7", "FAILED") + "".join(row(f"50_{task}", "PENDING", "hpcmoe:other-0") for task in range(3)))
    assert help_it(run)[0]["job_id"] == "50_2"


def test_a_run_whose_budget_is_used_up_ends_with_the_reason_and_the_failing_ranks_last_lines(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    run = stopped_run(tmp_path, "resilience.max_attempts_without_progress=1")
    folder = run.attempt("7.0")
    folder.mkdir(parents=True)
    (folder / "error-rank0002.txt").write_text("Traceback\nValueError: no such shard\n")
    (folder / "rank-0002.log").write_text("step 3\nValueError: no such shard\n")
    assert help_it(run)[0]["did"] == "finished"
    ended = read_record(run).finished
    assert ended is not None
    assert (ended["state"], ended["reason"]) == (
        "FAILED",
        "no progress in 1 attempts, the last one unknown: ended without a word",
    )
    assert ended["last_lines"] == ["attempts/7.0/rank-0002.log:", "step 3", "ValueError: no such shard"]
    assert slurm.calls("sbatch") == []


def test_a_run_at_its_ceiling_of_gpu_hours_rests_and_a_resume_may_raise_it(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path, "resilience.max_gpu_hours=0.1")  # 4 GPUs for 90 s, of which 120 are needed to leave
    assert help_it(run)[0]["did"] == "rested"
    assert result_state(run) is None
    with pytest.raises(UserError, match=r"resilience.max_gpu_hours=0.1 leaves no room .* --max-gpu-hours N"):
        resume(run)
    slurm.answers("squeue", row("7", "FAILED"))
    assert resume(run, max_gpu_hours=1.0) == "41"
    assert "--time=00:15:00" in slurm.calls("sbatch")[0]


def test_what_slurm_refuses_is_asked_again_only_after_a_while(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    slurm.answers("sbatch", stderr="sbatch: error: QOSMaxSubmitJobPerUserLimit", rc=1)
    assert help_it(run)[0]["did"] == "not_submitted"
    assert help_it(run) == []
    assert len(slurm.calls("sbatch")) == 1
    assert run.path.exists()


def test_a_run_whose_job_its_user_cancelled_is_closed(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    slurm.answers("squeue", row("7", "CANCELLED"))
    assert help_it(run)[0]["did"] == "finished"
    assert result_state(run) == "CANCELLED"


@pytest.mark.parametrize(("lift", "updates"), [("true", 1), ("false", 0)])
def test_a_hold_after_a_requeue_is_lifted_unless_the_run_says_no(
    slurm: FakeSlurm, tmp_path: Path, lift: str, updates: int
) -> None:
    run = stopped_run(tmp_path, f"resilience.lift_hold={lift}")
    held = row("7", "PENDING", reason="BeginTime").split(SEPARATOR)
    held[4] = str(int(time.time()) + 120)
    slurm.answers("squeue", SEPARATOR.join(held))
    slurm.answers("scontrol", "JobId=7 JobName=x\n   JobState=PENDING Reason=BeginTime\n")
    assert [deed["did"] for deed in help_it(run)] == ["hold_lifted"] * updates
    assert sum(call.startswith("update JobId=7 StartTime=") for call in slurm.calls("scontrol")) == updates
