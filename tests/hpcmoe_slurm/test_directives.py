"""#SBATCH lines carry what they are given. That sbatch reads them the same way is seen on the real Slurm (tests/slurm)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.errors import UserError
from hpcmoe.slurm.directives import directive, filename_pattern, read_directives, split, verbatim

PRINTABLE = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1)


@given(PRINTABLE)
def test_a_value_survives_the_way_there_and_back(value: str) -> None:
    assert read_directives("#!/bin/bash\n" + directive("comment", value)) == {"comment": value}


@pytest.mark.parametrize("value", ["two\nlines", "tab\there", "nul\0"])
def test_a_value_that_sbatch_would_change_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="--comment"):
        directive("comment", value)


def test_plain_values_stay_readable() -> None:
    assert directive("exclude", "lrdn[0001-0003]") == "#SBATCH --exclude=lrdn[0001-0003]"
    assert directive("time", "1-12:00:00") == "#SBATCH --time=1-12:00:00"
    assert directive("requeue") == "#SBATCH --requeue"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r"--a='b c' --d", ["--a=b c", "--d"]),
        (r"--a='it\'s' # a remark", ["--a=it's"]),
        (r'--a="\\ and \""', ['--a=\\ and "']),
        (r"--a=b\#c", ["--a=b#c"]),
        ("--a=''", ["--a="]),
    ],
)
def test_lines_are_split_as_sbatch_splits_them(line: str, words: list[str]) -> None:
    assert split(line) == words


def test_directives_below_the_first_command_do_not_count_and_the_last_of_several_wins() -> None:
    head = "#!/bin/bash\n#SBATCH --comment=first\n# a remark\n\n#SBATCH --comment=second --requeue\n"
    script = head + "set -u\n#SBATCH --comment=third\n"
    assert read_directives(script) == {"comment": "second"}


def test_percent_signs_of_a_path_are_doubled() -> None:
    assert filename_pattern("/a/100%/b") == "/a/100%%/b"


def test_a_path_with_a_backslash_is_refused_for_log_files() -> None:
    with pytest.raises(UserError, match="backslash"):
        filename_pattern("/a\\b")


def test_extra_flags_are_taken_as_they_are_but_must_be_flags() -> None:
    assert verbatim("--switches=1@01:00:00 --hold") == "#SBATCH --switches=1@01:00:00 --hold"
    with pytest.raises(UserError, match="flag"):
        verbatim("switches=1")
