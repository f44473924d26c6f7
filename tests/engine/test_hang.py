"""What signs of life say when nothing moves: as tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.engine.callbacks.callback import PHASES
from hpcmoe.engine.hang import Beat, diagnose, read_beats, silent_ranks, write_beat
from hpcmoe.runs.lastwords import last_step_done
from hpcmoe.runs.rundir import RunDir

DATA, COMPUTE, AGREE = Beat(7, "data", 40), Beat(7, "compute", 41), Beat(7, "agree", 42)


@pytest.mark.parametrize(
    ("beats", "silent", "behind", "text"),
    [
        (
            {0: AGREE, 1: COMPUTE, 2: AGREE},
            {1},
            [1],
            "no progress for 900 s; behind: rank 1 (step 7, compute, silent); the others are in step 7, agree",
        ),
        # nobody is silent: a rank that computes without end, or waits for its files
        (
            {0: COMPUTE, 1: DATA},
            set(),
            [1],
            "no progress for 900 s; behind: rank 1 (step 7, data); the others are in step 7, compute",
        ),
        # silent in the very same place as the others
        ({0: COMPUTE, 1: COMPUTE}, {0}, [0], "behind: rank 0 (step 7, compute, silent); the others are in step 7, compute"),
        ({0: COMPUTE, 1: COMPUTE}, set(), [], "no progress for 900 s; all 2 ranks are in step 7, compute"),
        # an earlier step is earlier whatever the phase
        ({0: Beat(8, "data", 1), 1: Beat(7, "save", 1)}, set(), [1], "behind: rank 1 (step 7, save)"),
        ({0: Beat(0, "build", 1), 1: None}, {1}, [1], "behind: rank 1 (no sign of life yet); the others are in step 0, build"),
        (dict.fromkeys(range(12)) | {0: AGREE}, set(range(1, 12)), list(range(1, 12)), "rank 8 (no sign of life yet) and 3 more"),
    ],
)
def test_the_ranks_that_are_waited_for_are_named(
    beats: dict[int, Beat | None], silent: set[int], behind: list[int], text: str
) -> None:
    diagnosis = diagnose(beats, silent, 900.0)
    assert [one.rank for one in diagnosis.behind] == behind
    assert text in diagnosis.text
    assert "\n" not in diagnosis.text


places = st.builds(Beat, st.integers(0, 3), st.sampled_from(PHASES), st.integers(0, 9))


@given(beats=st.dictionaries(st.integers(0, 20), places, min_size=1), data=st.data())
def test_a_living_rank_is_behind_exactly_when_another_is_farther(beats: dict[int, Beat], data: st.DataObject) -> None:
    silent = set(data.draw(st.lists(st.sampled_from(sorted(beats)))))
    behind = {one.rank: one for one in diagnose(beats, silent, 1.0).behind}
    for rank, beat in beats.items():
        overtaken = any(other.place > beat.place for other in beats.values())
        assert (rank in behind) == (rank in silent or overtaken)
    assert {rank for rank, one in behind.items() if one.silent} == silent


def test_signs_of_life_are_read_as_they_were_written_and_torn_ones_are_none(tmp_path: Path) -> None:
    write_beat(tmp_path, 0, Beat(1_000_000, "rendezvous", 12345))
    write_beat(tmp_path, 0, Beat(7, "agree", 12346))  # shorter: nothing of the longer one stays
    (tmp_path / "rank-0001").write_text("7 agr")
    assert read_beats(tmp_path, 3) == {0: Beat(7, "agree", 12346), 1: None, 2: None}


def test_signs_of_life_tell_the_last_step_that_was_surely_done(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert last_step_done(run, "7.0") is None
    run.heartbeats("7.0").mkdir(parents=True)
    write_beat(run.heartbeats("7.0"), 0, Beat(0, "load", 3))
    assert last_step_done(run, "7.0") is None, "no step was begun"
    write_beat(run.heartbeats("7.0"), 0, Beat(7, "agree", 12))
    (run.heartbeats("7.0") / "rank-0001").write_text("9 upd")
    assert last_step_done(run, "7.0") == 6
    write_beat(run.heartbeats("7.0"), 2, Beat(7, "save", 12))
    assert last_step_done(run, "7.0") == 7


def test_a_rank_is_silent_when_not_even_its_count_changes() -> None:
    before = {0: Beat(7, "agree", 1), 1: Beat(7, "agree", 1), 2: None, 3: None}
    after = {0: Beat(7, "agree", 2), 1: Beat(7, "agree", 1), 2: None, 3: Beat(0, "rendezvous", 1)}
    assert silent_ranks(before, after) == {1, 2}
