"""A run's state from its journal and from what Slurm says of its job. Recorded situations, no Slurm."""

import time
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.runs.life import JobView
from hpcmoe.runs.observe import observe, view
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import Record
from hpcmoe.slurm import client
from hpcmoe.slurm.client import QueueRow

NOW = 10_000.0


def record(*events: tuple[float, str, dict[str, Any]]) -> Record:
    lines = [{"attempt": None, **fields, "t": t, "event": name} for t, name, fields in events]
    return Record(RunDir(Path("/runs/abc123")), lines, given_metrics=[])


PLANNED = (0.0, "planned", {"run_id": "abc123", "scheduler": "slurm", "steps": 60})
SUBMITTED = (1.0, "submitted", {"job_id": "7", "how": "submit"})
STARTED = (50.0, "attempt_started", {"attempt": "7.0", "job_id": "7", "restart": 0, "gpus": 8})
ENDED = (60.0, "attempt_ended", {"attempt": "7.0", "cause": "preempted"})


@pytest.mark.parametrize(
    ("events", "job", "state"),
    [
        ([PLANNED], JobView(), "PLANNED"),
        ([PLANNED, SUBMITTED], JobView("PENDING", "Resources"), "QUEUED"),
        ([PLANNED, SUBMITTED, STARTED], JobView("RUNNING"), "RUNNING"),
        ([PLANNED, SUBMITTED, STARTED], JobView("COMPLETING"), "RUNNING"),
        ([PLANNED, SUBMITTED, STARTED], JobView("SUSPENDED"), "RUNNING"),
        ([PLANNED, SUBMITTED, STARTED], JobView("SIGNALING"), "RUNNING"),
        ([PLANNED, SUBMITTED, STARTED, ENDED], JobView("PENDING", "BeginTime"), "QUEUED"),
        ([PLANNED, SUBMITTED, STARTED], JobView("CANCELLED"), "CANCELLED"),
        # Slurm's word COMPLETED is not ours: nobody journalled that the last step was made
        ([PLANNED, SUBMITTED, STARTED], JobView("COMPLETED"), "STOPPED"),
        ([PLANNED, SUBMITTED, STARTED], JobView("PREEMPTED"), "STOPPED"),
        ([PLANNED, SUBMITTED, STARTED], JobView("NODE_FAIL"), "STOPPED"),
        # blind, or forgotten: never a guess
        ([PLANNED, SUBMITTED, STARTED], JobView(reachable=False, problem="no answer"), "UNKNOWN"),
        ([PLANNED, SUBMITTED, STARTED], JobView(), "UNKNOWN"),
        ([PLANNED, SUBMITTED], JobView("UNKNOWN"), "UNKNOWN"),  # a state word of a newer Slurm is no end,
        ([PLANNED, SUBMITTED, STARTED, (61.0, "finished", {"state": "COMPLETED"})], JobView("RUNNING"), "COMPLETED"),
        ([PLANNED, SUBMITTED, STARTED, (61.0, "rested", {"state": "STOPPED"})], JobView("COMPLETING"), "STOPPED"),
        # resumed by hand after that
        (
            [PLANNED, SUBMITTED, (61.0, "finished", {"state": "FAILED"}), (62.0, "submitted", {"job_id": "8"})],
            JobView("PENDING"),
            "QUEUED",
        ),
        ([PLANNED, SUBMITTED, (61.0, "cancel_requested", {})], JobView("COMPLETED"), "CANCELLED"),
        ([PLANNED, SUBMITTED, STARTED, ENDED, (61.0, "stranded", {"reason": "refused"})], JobView("FAILED"), "STOPPED"),
    ],
)
def test_the_state_of_a_run(events: list, job: JobView, state: str) -> None:
    assert view(record(*events), job, NOW).state == state


def test_unknown_names_the_last_known_state_and_since_when() -> None:
    seen = view(record(PLANNED, SUBMITTED, STARTED), JobView(reachable=False, problem="no answer"), NOW)
    assert (seen.last_known, seen.unknown_since, seen.reason) == ("RUNNING", 50.0, "no answer")


def test_a_job_submitted_a_moment_ago_is_queued_even_if_slurm_does_not_list_it_yet() -> None:
    assert view(record(PLANNED, (NOW - 3, "submitted", {"job_id": "7"})), JobView(), NOW).state == "QUEUED"


def test_a_run_whose_start_was_put_off_says_so() -> None:
    put_off = (61.0, "put_off", {"attempt": "7.0", "job_id": "7", "until": NOW + 60})
    clock = time.strftime("%H:%M:%S", time.localtime(NOW + 60))
    seen = view(record(PLANNED, SUBMITTED, STARTED, ENDED, put_off), JobView("PENDING", "BeginTime"), NOW)
    assert (seen.state, seen.reason) == ("QUEUED", f"BeginTime: put off until {clock}, as it ended too often")
    assert view(seen.record, JobView("PENDING", "Priority"), NOW + 61).reason == "Priority"


def test_only_an_unwanted_stop_is_for_a_supervisor() -> None:
    unwanted = view(record(PLANNED, SUBMITTED, STARTED), JobView("PREEMPTED"), NOW)
    wanted = view(record(PLANNED, SUBMITTED, STARTED, (61.0, "rested", {"state": "STOPPED"})), JobView(), NOW)
    assert (unwanted.involuntary, wanted.involuntary) == (True, False)
    assert unwanted.resumable
    assert wanted.resumable


def test_a_job_with_our_id_that_is_older_than_the_run_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    run = record((NOW - 50, "planned", {"run_id": "abc123"}), (NOW - 49, "submitted", {"job_id": "7"}))

    def row(submit: float) -> QueueRow:
        return QueueRow("7", "RUNNING", "None", submit, None, None, 1, "n1", "me", "job", "")

    monkeypatch.setattr(client, "sacct", lambda ids, since: [])
    for submit, state in ((NOW - 49, "RUNNING"), (NOW - 5000, "UNKNOWN")):
        monkeypatch.setattr(client, "squeue", lambda ids, submit=submit: {"7": row(submit)})
        assert observe([run], NOW)[0].state == state
