"""A rank that holds up the others is named, with its node, although all steps last equally long on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.straggler import WINDOW_S, WINDOW_STEPS, WINDOWS, Straggler, stragglers
from hpcmoe.runs.journal import Journal, read_journal
from tests.engine.callbacks import cases
from tests.engine.ranks import run_together, write_text


class Watched:
    """A straggler's callback on a clock of its own; a step takes a second."""

    def __init__(self, folder: Path, device: str = "cuda", stages: int = 1) -> None:
        self.now, self.step = 0.0, 0
        self.journal = folder / "events.jsonl"
        self.callback = Straggler(Journal(self.journal, "7.0"), ["n1", "n1", "n2", "n2"], device, stages, clock=lambda: self.now)

    def steps(self, count: int, *own_s: float, step_s: float = 2.0) -> None:
        for _ in range(count):
            self.step, self.now = self.step + 1, self.now + step_s
            figures = Agreed(2.0, 256, 1.0, 0.0, 1.0, torch.ones(1, 4), False, False, False, own_s=own_s)
            self.callback.after_step(self.step, figures, None)

    def told(self) -> list[tuple[int, str, float]]:
        return [(event["rank"], event["node"], event["times"]) for event in read_journal(self.journal)]


def test_a_rank_that_is_slow_again_and_again_is_told_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.steps(WINDOWS * WINDOW_STEPS, 1.0, 1.01, 1.3, 0.99)
    assert watched.told() == [], "the attempt's first step does not count"
    watched.steps(10 * WINDOW_STEPS, 1.0, 1.01, 1.3, 0.99)
    assert watched.told() == [(2, "n2", 1.3)]


def test_a_rank_that_is_slow_now_and_then_is_not(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.steps(1, 9.0, 1.0, 1.0, 1.0)
    for _ in range(5):
        watched.steps(2 * WINDOW_STEPS, 1.0, 1.0, 3.0, 1.0)
        watched.steps(WINDOW_STEPS, 1.0, 1.0, 1.1, 1.0)
    for _ in range(WINDOWS * 10):  # one step in a window
        watched.steps(1, 1.0, 1.0, 99.0, 1.0)
        watched.steps(WINDOW_STEPS - 1, 1.0, 1.0, 1.0, 1.0)
    assert watched.told() == []


def test_short_steps_are_watched_for_as_long_as_long_ones(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    step_s = 0.01
    watched.steps(int(WINDOWS * WINDOW_S / step_s) - 10, 1.0, 1.0, 5.0, 1.0, step_s=step_s)
    assert watched.told() == []
    watched.steps(100, 1.0, 1.0, 5.0, 1.0, step_s=step_s)
    assert watched.told() == [(2, "n2", 5.0)]


@pytest.mark.parametrize(
    ("medians", "found"),
    [
        ([1.0, 1.2], {}),
        ([1.0, 1.3], {1: 1.0}),
        ([1.0, 1.3, 1.4, 1.0, 1.0], {1: 1.0, 2: 1.0}),
        ([1.0], {}),
        ([0.0, 0.0], {}),
        ([0.0, 1.0], {}),  # nothing is known of the others
    ],
)
def test_slow_is_what_the_others_are_not(medians: list[float], found: dict[int, float]) -> None:
    assert stragglers(medians, 1.25) == found


def test_of_two_ranks_that_train_together_the_one_whose_attention_is_slow_is_told(tmp_path: Path) -> None:
    run_together(2, tmp_path, cases.the_rank_with_slow_attention_is_told, write_text(tmp_path / "text"), tmp_path)


def test_ranks_are_compared_within_a_stage_of_the_pipeline(tmp_path: Path) -> None:
    watched = Watched(tmp_path, stages=2)
    watched.steps(10 * WINDOW_STEPS, 1.0, 1.0, 3.0, 3.0)
    assert watched.told() == []
    watched.steps(10 * WINDOW_STEPS, 1.0, 1.0, 3.0, 9.0)
    assert watched.told() == [(3, "n2", 3.0)]
