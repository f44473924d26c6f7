"""Slurm's words to values and back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.slurm.parse import (
    SEPARATOR,
    JobId,
    compress_hostlist,
    expand_hostlist,
    format_duration,
    format_timestamp,
    parse_duration,
    parse_job_id,
    parse_records,
    parse_rows,
    parse_seconds,
    parse_submitted,
    parse_timestamp,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123", JobId(123)),
        ("123_4", JobId(123, tasks=(4,))),
        ("123_[0-5%2]", JobId(123, tasks=(0, 1, 2, 3, 4, 5))),
        ("25_[1-9:2%4]", JobId(25, tasks=(1, 3, 5, 7, 9))),
        ("99_[7]", JobId(99, tasks=(7,))),
        ("99_[1,4-5,9]", JobId(99, tasks=(1, 4, 5, 9))),
        ("27+0", JobId(27, het=0)),
        ("26_[1,3,200,20", JobId(26, tasks=(1, 3, 200), cut=True)),  # squeue cuts in the middle of a number
        ("26_[1-3,5,218...]", JobId(26, tasks=(1, 2, 3, 5), cut=True)),  # sacct's way to cut
        (" 5\n", JobId(5)),
    ],
)
def test_job_ids_in_every_form_that_slurm_prints(text: str, expected: JobId) -> None:
    assert parse_job_id(text) == expected


@pytest.mark.parametrize("text", ["", "abc", "12x", "12_", "_3", "12_[a]", "12_[1-9:0]", "-3", "12.batch"])
def test_what_is_no_job_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="job"):
        parse_job_id(text)


@given(st.integers(1, 10**9), st.lists(st.integers(0, 5000), min_size=1, unique=True))
def test_each_task_of_an_array_has_an_id_that_reads_back(job: int, tasks: list[int]) -> None:
    whole = parse_job_id(f"{job}_[{','.join(map(str, tasks))}]")
    assert [parse_job_id(one) for one in whole.each()] == [JobId(job, tasks=(task,)) for task in tasks]


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 9), st.integers(1, 50))
def test_a_range_with_a_step_is_pythons_range(first: int, length: int, step: int, most: int) -> None:
    parsed = parse_job_id(f"7_[{first}-{first + length}:{step}%{most}]")
    assert parsed.tasks == tuple(range(first, first + length + 1, step))


@given(st.text(max_size=30))
def test_any_text_is_a_job_id_or_a_value_error(text: str) -> None:
    try:
        ids = parse_job_id(text).each()
    except ValueError:
        return
    assert all(one[0].isdigit() for one in ids)


@pytest.mark.parametrize(("stdout", "job_id"), [("123\n", "123"), ("123;leonardo\n", "123"), ("a notice: 2 nodes\n45\n", "45")])
def test_the_job_id_of_a_submission(stdout: str, job_id: str) -> None:
    assert parse_submitted(stdout) == job_id


def test_a_number_in_a_notice_is_no_job_id() -> None:
    with pytest.raises(ValueError, match="no job id"):
        parse_submitted("Submitted after previous job 99, on 2 nodes\n")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("lrdn[0001-0003,0010]", ["lrdn0001", "lrdn0002", "lrdn0003", "lrdn0010"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("login,n[9-11]", ["login", "n9", "n10", "n11"]),
        ("n[09-11]-ib", ["n09-ib", "n10-ib", "n11-ib"]),
        ("", []),
        ("(null)", []),
        ("None assigned", []),
    ],
)
def test_host_lists_expand(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[1-2", "n1-2]", "n[a-b]", "n[1-]", "n[[1]]"])
def test_a_broken_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        expand_hostlist(text)


HOST = st.from_regex(r"[a-z]{1,4}(-[a-z]{1,3})?[0-9]{0,5}", fullmatch=True)


@given(st.lists(HOST, max_size=40))
def test_host_lists_survive_the_way_there_and_back(hosts: list[str]) -> None:
    assert expand_hostlist(compress_hostlist(hosts)) == hosts


def test_neighbours_become_a_range() -> None:
    assert compress_hostlist(["n0001", "n0002", "n0003", "n0007", "login"]) == "n[0001-0003,0007],login"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("90:30", 5430),
        ("24:00:00", 86400),
        ("0:30:00", 1800),
        ("1-0", 86400),
        ("1-12", 129600),
        ("2-03:04", 183840),
        ("1-02:03:04", 93784),
        ("00:00", 0),
        ("00:00:01.500", 1),
        ("UNLIMITED", None),
        ("infinite", None),
        ("Partition_Limit", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_durations_in_every_form_that_slurm_takes(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["an hour", "1:2:3:4", "1-2-3", "5m", "-5", "1-", ":30"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="times"):
        parse_duration(text)


@given(st.integers(0, 10**8))
def test_durations_survive_the_way_there_and_back(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(1, 4 * 10**9))
def test_epoch_seconds_are_read_as_they_are(epoch: int) -> None:
    assert parse_timestamp(str(epoch)) == epoch


def test_a_local_time_is_read_in_this_machines_zone() -> None:
    now = float(int(time.time()))
    assert parse_timestamp(format_timestamp(now)) == now


@pytest.mark.parametrize("text", ["Unknown", "None", "N/A", "", "0"])
def test_no_point_in_time_is_none(text: str) -> None:
    assert parse_timestamp(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("30 sec", 30), ("300 sec", 300), ("8", 8), ("00:00:08", 8), ("N/A", None), ("INFINITE", None)]
)
def test_seconds_of_a_site_s_settings(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


def test_a_job_name_cannot_pretend_to_be_another_field() -> None:
    text = (
        "JobId=7 JobName=x JobState=COMPLETED ExitCode=0:0\n   JobState=FAILED Reason=NonZeroExitCode\n   Comment=a b JobId=9\n"
    )
    [record] = parse_records(text)
    assert record["JobName"] == "x JobState=COMPLETED ExitCode=0:0"
    assert (record["JobId"], record["JobState"], record["Comment"]) == ("7", "FAILED", "a b JobId=9")


@given(st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["C", "Z"]), max_size=8)] * 3), max_size=5))
def test_rows_survive_any_text_in_a_cell(rows: list[tuple[str, str, str]]) -> None:
    text = "\n".join(SEPARATOR.join(row) for row in rows)
    assert parse_rows(text, 3) == [list(row) for row in rows]


def test_a_torn_line_is_not_a_row() -> None:
    assert parse_rows(SEPARATOR.join("ab") + "\nslurm_load_jobs error: a message\n" + SEPARATOR.join("abc"), 3) == [
        ["a", "b", "c"]
    ]
