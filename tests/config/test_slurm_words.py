"""Values of slurm.* with a form of their own. What is taken and what is refused was tried with sbatch 22.05."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.config.compose import load
from hpcmoe.config.schema import SlurmConfig
from hpcmoe.config.slurm_words import DEPENDENCIES, MAIL_TYPES, check_slurm_words
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError

BEGINS = """now; now+60; now+1hour; now+2days; now+1week; NOW+1HOUR; now + 1hour; now-1hour; 16:00; 16:00:30; 4:00PM; 12:00 AM;
midnight; noon; fika; teatime; today; tomorrow; tomorrow 10:00; 10:00 tomorrow; 10:00tomorrow; 2027-01-20; 2027-01-20T12:34;
2027-01-20T12:34:00; 2027-01-20 12:34; 012027; 01/20/27; 01.20.27; 01/20; 1/2/27; 01/20/27-10:00"""
DEPENDENCY_FORMS = [
    *("afterok:1", "afterok:1:2", "afterany:1,afterok:2", "afterok:1?afterany:2", "singleton", "singleton,afterok:1"),
    *("after:1+5", "aftercorr:1", "afterok:1_2", "afterok:1_*", "AFTEROK:1", "afternotok:1+3", "afterok:1+5:2", "1"),
]
NO_BEGINS = ["soon", "now+", "now+1fortnight", "now+5min", "now+1h", "25:00", "4PM", "12am", "2027-13-01", "2027-01-32", ""]


@pytest.mark.parametrize("begin", [text.strip() for text in BEGINS.split(";")])
def test_every_form_of_a_beginning_is_taken(begin: str) -> None:
    check_slurm_words(SlurmConfig(begin=begin))


@pytest.mark.parametrize("begin", NO_BEGINS)
def test_what_is_no_beginning_is_refused_with_the_forms(begin: str) -> None:
    with pytest.raises(UserError, match=r"slurm\.begin=.* is not a time of Slurm's; write it as now\+2hours"):
        check_slurm_words(SlurmConfig(begin=begin))


@pytest.mark.parametrize("mail", ["END", "end", "END,FAIL", "END, FAIL", "ALL", "TIME_LIMIT_90", "NONE,END", "ARRAY_TASKS"])
def test_mail_types_are_taken_in_any_case_and_number(mail: str) -> None:
    check_slurm_words(SlurmConfig(mail_type=mail))


@pytest.mark.parametrize("dependency", DEPENDENCY_FORMS)
def test_every_form_of_a_dependency_is_taken(dependency: str) -> None:
    check_slurm_words(SlurmConfig(dependency=dependency))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"mail_type": "END,FIAL"}, "no slurm.mail_type 'FIAL'; did you mean 'FAIL'? valid: ALL, ARRAY_TASKS, BEGIN"),
        ({"mail_type": ""}, "no slurm.mail_type ''"),
        ({"nice": 2147483646}, "slurm.nice=2147483646 must be between -2147483645 and 2147483645"),
        ({"dependency": "after0k:1"}, "no kind of slurm.dependency 'after0k'; did you mean 'afterok'?"),
        ({"dependency": "afterok"}, "'afterok' must name jobs, such as afterok:1234"),
        ({"dependency": "afterok:"}, "'afterok:' must name jobs"),
        ({"dependency": "afterany:1,afterok:x"}, "'afterok:x' must name jobs"),
        ({"dependency": "afterok:1, afterany:2"}, "no kind of slurm.dependency ' afterany'; did you mean 'afterany'?"),
        ({"dependency": "afterok:1,afterany:2?singleton"}, "',' (all of them) and '?' (any of them) do not go together"),
    ],
)
def test_a_mistake_is_one_line_that_names_what_would_be_right(words: dict[str, object], line: str) -> None:
    with pytest.raises(UserError) as refused:
        check_slurm_words(SlurmConfig(**words))  # type: ignore[arg-type]
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.lists(st.sampled_from(MAIL_TYPES), min_size=1))
def test_any_mail_types_go_together(types: list[str]) -> None:
    check_slurm_words(SlurmConfig(mail_type=",".join(types)))


@given(st.sampled_from([kind for kind in DEPENDENCIES if kind != "singleton"]), st.lists(st.integers(1, 10**9), min_size=1))
def test_any_jobs_can_be_waited_for(kind: str, jobs: list[int]) -> None:
    check_slurm_words(SlurmConfig(dependency=":".join([kind, *map(str, jobs)])))


@given(st.sampled_from(["begin", "mail_type", "dependency"]), st.text(max_size=30))
def test_any_text_is_taken_or_refused_and_nothing_else(name: str, text: str) -> None:
    slurm = SlurmConfig()
    setattr(slurm, name, text)
    with contextlib.suppress(UserError):
        check_slurm_words(slurm)


def test_a_run_with_a_word_that_sbatch_cannot_read_is_refused_before_it_exists() -> None:
    with pytest.raises(UserError, match="did you mean 'FAIL'"):
        validate(load(["cluster=testbed", "slurm.mail_type=FIAL"]))
