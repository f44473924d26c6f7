"""Which of Slurm's words mean alive, which mean over."""

import pytest

from hpcmoe.slurm.states import ALIVE, ENDED, UNKNOWN, base_state, is_alive, is_ended


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CANCELLED by 1000", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("RUNNING", "RUNNING"),
        ("OUT_OF_ME+", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_decoration_is_taken_off(word: str, state: str) -> None:
    assert base_state(word) == state


def test_no_state_is_both_alive_and_over() -> None:
    assert not ALIVE & ENDED


@pytest.mark.parametrize("word", ["SIGNALING", "SUSPENDED", "CONFIGURING", "SPECIAL_EXIT", "COMPLETING", "REQUEUED", "RESIZING"])
def test_a_job_in_an_unusual_state_is_alive(word: str) -> None:
    assert is_alive(word)
    assert not is_ended(word)


@pytest.mark.parametrize("word", ["UNKNOWN", "EXPEDITING", "", "completed-ish"])
def test_a_word_from_another_slurm_is_neither_alive_nor_over(word: str) -> None:
    assert not is_alive(word)
    assert not is_ended(word)
