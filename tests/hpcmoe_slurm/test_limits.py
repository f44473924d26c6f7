"""How many jobs a user may still submit: from sacctmgr's and squeue's text, or from the words of a refusal."""

from __future__ import annotations

import pytest

from hpcmoe.slurm.command import SlurmRejected
from hpcmoe.slurm.limits import MyJob, SubmitLimit, no_room, read_limits, read_mine
from hpcmoe.slurm.parse import SEPARATOR, compress_job_ids

ASSOC = "lab||normal|50|\nother||long||200\n"
QOS = "normal|20||\nlong|||\nboost|8|100|\n"


def test_limits_are_those_of_the_account_and_of_every_qos_that_holds_for_the_job() -> None:
    assert read_limits(ASSOC, QOS, "lab", [None]) == [
        SubmitLimit(50, "MaxSubmitJobs of account lab", account="lab"),
        SubmitLimit(20, "MaxSubmitJobsPerUser of QOS normal", qos="normal"),
    ]
    assert [limit.most for limit in read_limits(ASSOC, QOS, "other", ["boost"])] == [200, 8, 100]
    assert [limit.most for limit in read_limits(ASSOC, QOS, "lab", ["long", "boost"])] == [50, 8, 100]
    assert [limit.most for limit in read_limits("lab||normal|50|\n", QOS, None, [None])] == [50, 20]
    assert read_limits("", "", None, [None]) == []


def test_limits_of_other_accounts_and_partitions_hold_nothing_back() -> None:
    """An account that has expired has MaxSubmitJobs=0, and a partition for tests a low one."""
    assert read_limits(ASSOC + "expired|||0|\n", QOS, None, [None]) == [], "which is the default account is not told"
    assoc = "lab||normal|50|\nlab|debug|normal|2|\n"
    assert [limit.most for limit in read_limits(assoc, "", "lab", [None], "prod")] == [50]
    assert [limit.most for limit in read_limits(assoc, "", "lab", [None], "debug")] == [50, 2]


def test_only_jobs_that_count_use_up_a_limit() -> None:
    jobs = [
        MyJob("1", "RUNNING", "lab", "normal"),
        MyJob("2_0", "PENDING", "lab", "boost"),
        MyJob("3", "PENDING", "other", "normal"),
    ]
    assert SubmitLimit(5, "", account="lab").left(jobs) == 3
    assert SubmitLimit(2, "", qos="normal").left(jobs) == 0
    assert SubmitLimit(1, "").left(jobs) == 0


def test_elements_are_counted_one_by_one_and_ended_ones_not() -> None:
    rows = [
        ("41_[2-4%2]", "PENDING", "lab", "normal", "hpcmoe:abc123-s0"),
        ("41_0", "RUNNING", "lab", "normal", "(null)"),
        ("40", "COMPLETED", "lab", "normal", "mine"),
    ]
    jobs = read_mine("\n".join(SEPARATOR.join(row) for row in rows))
    assert [(job.job_id, job.job, job.state) for job in jobs] == [
        ("41_2", "41", "PENDING"),
        ("41_3", "41", "PENDING"),
        ("41_4", "41", "PENDING"),
        ("41_0", "41", "RUNNING"),
    ]
    assert (jobs[0].comment, jobs[3].comment) == ("hpcmoe:abc123-s0", "")


POLICY = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("said", "others", "full"),
    [
        (f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}", 0, True),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{POLICY}", 3, True),
        (f"sbatch: error: AssocGrpSubmitJobsLimit\n{POLICY}", 0, True),
        (f"sbatch: error: QOSMaxNodePerUserLimit\n{POLICY}", 3, False),
        (POLICY, 3, True),
        (POLICY, 0, False),
        ("sbatch: error: invalid partition specified: nono", 3, False),
    ],
)
def test_a_full_queue_is_told_from_a_wrong_job(said: str, others: int, full: bool) -> None:
    assert no_room(SlurmRejected("Job violates accounting/QOS policy", said), lambda: others) is full


def test_the_elements_of_an_array_are_one_word() -> None:
    assert compress_job_ids(["41_0", "7", "41_1", "41_5", "42_3"]) == ["7", "41_[0-1,5]", "42_3"]
