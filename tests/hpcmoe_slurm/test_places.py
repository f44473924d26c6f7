"""Places in a queue that a real Slurm 22.05.8 showed (recorded/), and in others like it."""

from __future__ import annotations

import pytest

from hpcmoe.slurm.parse import SEPARATOR
from hpcmoe.slurm.places import QueuePlace, places_among
from tests.hpcmoe_slurm.fakes import RECORDED


def test_a_recorded_queue_has_places_for_those_that_nothing_of_their_own_holds_back() -> None:
    text = (RECORDED / "squeue_waiting.txt").read_text(encoding="utf-8")
    found = places_among(text, {"2", "3", "4_0", "4_5", "99"})
    assert found == {
        "2": QueuePlace(1, 2, only_own=True),
        "4_0": QueuePlace(2, 2, only_own=True),
        "4_5": QueuePlace(2, 2, only_own=True),
    }, "job 3 is held, job 99 is not there"


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin", "Dependency", "BeginTime", "PartitionTimeLimit"])
def test_who_is_held_back_is_before_nobody_and_has_no_place(reason: str) -> None:
    rows = [("1", "a", "90", reason, "you"), ("2", "a", "10", "Priority", "me")]
    text = "".join(SEPARATOR.join(row) + "\n" for row in rows)
    assert places_among(text, {"1", "2"}) == {"2": QueuePlace(1, 1, only_own=True)}
