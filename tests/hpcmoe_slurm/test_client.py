"""Questions to Slurm when it answers in a way that could mislead."""

from __future__ import annotations

import time

import pytest

from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmRejected, SlurmUnreachable
from hpcmoe.slurm.facts import SEPARATOR
from hpcmoe.slurm.parse import parse_timestamp
from tests.hpcmoe_slurm.fakes import RECORDED, FakeSlurm


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ACCOUNTING_EVERY_S", 0.01)


def row(job_id: str, state: str, submit: int, start: int, end: int | None, name: str = "hpcmoe-a") -> str:
    cells = [job_id, state, "0:0", submit, start, end or "Unknown", 1, "cpu=1", "n1", name]
    return SEPARATOR.join(map(str, cells)) + "\n"


def test_a_forgotten_job_is_not_an_outage(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    slurm.answers("scontrol", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    assert client.squeue(["7"]) == {}
    assert client.show_job("7") is None


def test_an_outage_is_not_an_empty_queue(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", rc=1)
    with pytest.raises(SlurmUnreachable):
        client.squeue(["7"])


def test_many_jobs_are_one_call_and_none_is_no_call(slurm: FakeSlurm) -> None:
    slurm.answers("squeue")
    slurm.answers("sacct")
    client.squeue([str(n) for n in range(50)])
    assert client.squeue([]) == {}
    assert client.sacct([], since=0.0) == []
    assert len(slurm.calls("squeue")) == 1
    assert slurm.calls("sacct") == []


def test_accounting_of_an_older_job_with_the_same_id_is_left_out(slurm: FakeSlurm) -> None:
    slurm.answers("sacct", row("7", "FAILED", 1000, 1001, 1002) + row("7", "RUNNING", 5000, 5001, None))
    assert [found.state for found in client.sacct(["7"], since=4000.0)] == ["RUNNING"]


def test_accounting_of_another_job_name_is_left_out(slurm: FakeSlurm) -> None:
    slurm.answers("sacct", row("7", "FAILED", 5000, 5001, 5002, name="other") + row("7", "RUNNING", 5000, 5001, None))
    assert [found.state for found in client.sacct(["7"], since=0.0, name="hpcmoe-a")] == ["RUNNING"]


def test_no_accounting_is_an_error_and_no_empty_list(slurm: FakeSlurm) -> None:
    slurm.answers("sacct", stderr="Slurm accounting storage is disabled\n", rc=1)
    with pytest.raises(SlurmRejected, match="disabled"):
        client.sacct(["7"], since=0.0)


def recorded_job(slurm: FakeSlurm, name: str) -> None:
    """``scontrol show job`` gives a recorded job; every other verb of scontrol succeeds in silence."""
    slurm.runs("scontrol", f'[[ $1 == show ]] && cat "{RECORDED / name}"; exit 0')


@pytest.mark.parametrize(
    ("name", "acct", "ended_as"),
    [
        ("completing_cancelled.txt", "CANCELLED by 1000", "CANCELLED"),
        ("completing_preempted.txt", "PREEMPTED", "PREEMPTED"),
        ("completing_requeued.txt", "REQUEUED", "REQUEUED"),
    ],
)
def test_accounting_tells_what_completing_hides(slurm: FakeSlurm, name: str, acct: str, ended_as: str) -> None:
    recorded_job(slurm, name)
    job_id = {"completing_cancelled.txt": "27", "completing_requeued.txt": "28", "completing_preempted.txt": "29"}[name]
    slurm.answers("sacct", row(job_id, acct, 1796023664, 1796023664, 1796023677))
    facts = client.show_ending(job_id)
    assert facts is not None
    assert (facts.state, facts.ended_as) == ("COMPLETING", ended_as)


@pytest.mark.parametrize(
    "answer",
    [{"rc": 1, "stderr": "Slurm accounting storage is disabled"}, {"stdout": row("29", "RUNNING", 1796023664, 1796023664, None)}],
)
def test_where_accounting_does_not_tell_the_end_stays_hidden(slurm: FakeSlurm, answer: dict) -> None:
    recorded_job(slurm, "completing_preempted.txt")
    slurm.answers("sacct", **answer)
    facts = client.show_ending("29")
    assert facts is not None
    assert facts.ended_as is None


def requeues(slurm: FakeSlurm) -> list[str]:
    return [call for call in slurm.calls("scontrol") if call.startswith("requeue")]


def test_a_cancelled_job_is_never_requeued(slurm: FakeSlurm) -> None:
    recorded_job(slurm, "completing_cancelled.txt")
    slurm.answers("sacct", row("27", "CANCELLED by 0", 1796023664, 1796023664, 1796023668))
    with pytest.raises(SlurmRejected, match="CANCELLED"):
        client.requeue("27")
    assert requeues(slurm) == ["requeue Incomplete 27"]


def test_a_job_whose_grace_is_over_is_requeued_though_incomplete_passes_it_over(slurm: FakeSlurm) -> None:
    recorded_job(slurm, "completing_preempted.txt")
    slurm.answers("sacct", row("29", "PREEMPTED", 1796023664, 1796023664, 1796023677))
    client.requeue("29")
    assert requeues(slurm) == ["requeue Incomplete 29", "requeue 29"]


def test_without_accounting_a_leaving_job_is_not_requeued_for_fear_that_it_was_cancelled(slurm: FakeSlurm) -> None:
    recorded_job(slurm, "completing_preempted.txt")
    slurm.answers("sacct", stderr="Slurm accounting storage is disabled", rc=1)
    with pytest.raises(SlurmRejected):
        client.requeue("29")
    assert requeues(slurm) == ["requeue Incomplete 29"]


def test_a_requeue_that_worked_is_not_repeated(slurm: FakeSlurm) -> None:
    recorded_job(slurm, "completing_requeued.txt")
    slurm.answers("sacct", row("28", "REQUEUED", 1796023664, 1796023664, 1796023668))
    client.requeue("28")
    assert requeues(slurm) == ["requeue Incomplete 28"]


def test_a_refused_requeue_names_slurms_reason(slurm: FakeSlurm) -> None:
    slurm.answers("scontrol", stderr="Requested operation is presently disabled for job 7\n", rc=1)
    with pytest.raises(SlurmRejected, match="presently disabled"):
        client.requeue("7")


@pytest.mark.parametrize(("record", "job_id", "seconds"), [("completing_requeued.txt", "28", 10.0), ("pending.txt", "30", 5.0)])
def test_a_hold_is_moved_some_seconds_ahead_and_never_to_now(slurm: FakeSlurm, record: str, job_id: str, seconds: float) -> None:
    recorded_job(slurm, record)
    asked = time.time()
    assert client.start_soon(job_id)
    start = parse_timestamp(slurm.calls("scontrol")[-1].partition("StartTime=")[2])
    assert start is not None
    assert asked + seconds - 1 <= start <= time.time() + seconds  # Slurm's times are whole seconds


def test_a_start_may_be_put_off_instead(slurm: FakeSlurm) -> None:
    recorded_job(slurm, "pending.txt")
    until = float(int(time.time()) + 1800)
    assert client.start_soon("7", until)
    assert parse_timestamp(slurm.calls("scontrol")[-1].partition("StartTime=")[2]) == until


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [(7200.0, None), (3600.0, None), (1790.0, "00:39:00"), (10.0, "00:10:00")],  # it runs for 10 minutes, and may for 70
)
def test_a_running_job_is_made_to_end_in_time_by_whole_minutes(slurm: FakeSlurm, seconds: float, limit: str | None) -> None:
    now = int(time.time())
    times = f"StartTime={now - 601} EndTime={now + 3600}"
    slurm.answers("scontrol", f"JobId=7 JobName=x\n   JobState=RUNNING Reason=None\n   {times}\n")
    assert client.end_within("7", seconds)
    asked = [call for call in slurm.calls("scontrol") if call.startswith("update")]
    assert asked == ([] if limit is None else [f"update JobId=7 TimeLimit={limit}"])


def test_a_time_limit_that_slurm_does_not_shorten_is_told(slurm: FakeSlurm) -> None:
    now = int(time.time())
    job = f"JobId=7 JobName=x\n   JobState=RUNNING Reason=None\n   StartTime={now} EndTime={now + 3600}\n"
    slurm.runs("scontrol", f"[[ $1 == show ]] || exit 1; printf %s '{job}'")
    assert not client.end_within("7", 60.0)
    slurm.answers("scontrol", stderr="slurm_load_jobs error: Invalid job id specified", rc=1)
    assert not client.end_within("7", 60.0)
