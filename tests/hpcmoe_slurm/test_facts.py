"""What a real Slurm 22.05.8 said (recorded/), read."""

from __future__ import annotations

import pytest

from hpcmoe.slurm.facts import (
    SEPARATOR,
    JobFacts,
    gpus_of,
    partition_of,
    read_accounting,
    read_cluster,
    read_exit_code,
    read_jobs,
    read_queue,
)
from hpcmoe.slurm.parse import parse_records
from tests.hpcmoe_slurm.fakes import RECORDED


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def job(name: str) -> JobFacts:
    [facts] = read_jobs(recorded(name))
    return facts


def test_the_queue_knows_each_task_of_an_array_by_its_own_id() -> None:
    rows = read_queue(recorded("squeue.txt"))
    assert set(rows) == {"16", "17", *(f"24_{task}" for task in (0, 3, 6, 9, 12, 15, 294))}
    assert (rows["16"].state, rows["24_0"].state, rows["24_6"].state) == ("CANCELLED", "RUNNING", "PENDING")


def test_a_job_name_with_bars_and_a_comment_with_fields_stay_what_they_are() -> None:
    row = read_queue(recorded("squeue.txt"))["24_0"]
    assert (row.name, row.comment, row.nodelist) == ("array of | many", "a=b JobState=FAILED", "n0001")
    assert row.end is not None
    assert row.start is not None
    assert row.end - row.start == 1800


def test_a_pending_task_has_no_start() -> None:
    row = read_queue(recorded("squeue.txt"))["24_6"]
    assert (row.start, row.end, row.reason, row.comment) == (None, None, "JobArrayTaskLimit", "a=b JobState=FAILED")


def test_a_shortened_list_of_tasks_becomes_one_row_a_task() -> None:
    text = SEPARATOR.join(["9_[1-3%2]", "PENDING", "Resources", "1", "N/A", "N/A", "1", "", "me", "name", "(null)"])
    assert sorted(read_queue(text)) == ["9_1", "9_2", "9_3"]


def test_a_state_of_a_newer_slurm_is_unknown() -> None:
    text = SEPARATOR.join(["9", "EXPEDITING", "None", "1", "2", "3", "1", "n1", "me", "name", ""])
    assert read_queue(text)["9"].state == "UNKNOWN"


def test_accounting_has_every_start_of_a_job_in_their_order() -> None:
    rows = read_accounting(recorded("sacct.txt"))
    assert [row.state for row in rows if row.job_id == "20"] == ["PREEMPTED", "COMPLETED"]
    assert [row.state for row in rows if row.job_id == "16"] == ["CANCELLED"]
    assert [(row.alloc_gpus, row.elapsed_s) for row in rows if row.job_id == "20"] == [(4, 4.0), (4, 1.0)]


@pytest.mark.parametrize(("text", "code"), [("0:0", 0), ("7:0", 7), ("0:15", 143), ("0:53", 181), ("", 1), ("what", 1)])
def test_exit_codes_are_those_of_a_shell_and_what_cannot_be_read_is_a_failure(text: str, code: int) -> None:
    assert read_exit_code(text) == code


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("billing=8,cpu=8,gres/gpu=4,node=1", 4),
        ("cpu=8,gres/gpu=8,gres/gpu:a100=8", 8),
        ("gres/gpu:a100=2,gres/gpu:h100=1", 3),
        ("cpu=8,mem=1M", 0),
        ("", 0),
    ],
)
def test_gpus_of_an_allocation(tres: str, gpus: int) -> None:
    assert gpus_of(tres) == gpus


def test_a_job_in_its_grace_time_runs_has_a_preempt_time_and_an_end_that_came_nearer() -> None:
    facts = job("in_grace.txt")
    assert (facts.state, facts.requeueing, facts.name, facts.comment) == ("RUNNING", False, "preempted", "two words")
    assert facts.preempt_time is not None
    assert facts.end_time is not None
    assert facts.time_limit_s == 600
    assert facts.end_time - facts.preempt_time == 8  # GraceTime


@pytest.mark.parametrize(
    ("name", "requeueing", "restarts"),
    [("completing_cancelled.txt", False, 0), ("completing_preempted.txt", False, 0), ("completing_requeued.txt", True, 1)],
)
def test_a_job_that_leaves_tells_whether_it_comes_back(name: str, requeueing: bool, restarts: int) -> None:
    facts = job(name)
    assert (facts.state, facts.requeueing, facts.restarts) == ("COMPLETING", requeueing, restarts)


def test_a_pending_job_has_no_hosts() -> None:
    facts = job("pending.txt")
    assert (facts.state, facts.hosts, facts.batch_host) == ("PENDING", (), None)


def test_records_of_an_array_are_told_apart() -> None:
    ids = [facts.job_id for facts in read_jobs(recorded("show_array.txt"))]
    assert set(ids) == {"24", "24_0", "24_3"}


def test_the_cluster_s_settings() -> None:
    facts = read_cluster(recorded("show_config.txt"))
    assert facts.version == (22, 5, 8)
    assert (facts.kill_wait_s, facts.message_timeout_s, facts.min_job_age_s) == (6.0, 10.0, 300.0)
    assert (facts.max_array_size, facts.job_requeue, facts.accounting, facts.user_signal) == (1001, True, True, False)
    assert facts.auth_cred_expire_s == 5.0


@pytest.mark.parametrize(
    "line",
    [
        "SlurmctldParameters     = idle_on_node_suspend,preempt_send_user_signal",
        "PreemptParameters       = send_user_signal,min_exempt_priority=1",
    ],
)
def test_the_user_signal_is_found_in_both_of_its_places(line: str) -> None:
    assert read_cluster(line).user_signal


def test_a_partition_s_rules() -> None:
    [facts] = [partition_of(record) for record in parse_records(recorded("show_partition.txt"))]
    assert (facts.name, facts.preempt_mode, facts.grace_s, facts.max_time_s, facts.up) == (
        "cancel_grace",
        "CANCEL",
        8.0,
        86400.0,
        True,
    )
