"""Which steps are not taken, that all ranks agree, and that too many end the run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.config.schema import SkipConfig
from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.skip import SkipStep, spike_limit
from hpcmoe.errors import UserError
from tests.engine.callbacks import cases
from tests.engine.ranks import run_together, write_text


def agreed(loss: float, norm: float = 1.0) -> Agreed:
    return Agreed(loss, 256, 1.0, 0.0, norm, torch.ones(1, 4), signal=False, control_stop=False, save=False)


def judge(skip: SkipStep, figures: list[Agreed], first: int = 1) -> list[str]:
    """The reasons, "" where a step is taken; the last one is the error's line if the run ends."""
    reasons: list[str] = []
    for step, one in enumerate(figures, start=first):
        try:
            reason = skip.reason_to_skip(step, one)
        except UserError as error:
            return [*reasons, str(error)]
        skip.after_step(step, one, reason)
        reasons.append(reason or "")
    return reasons


def skipper(**config: float) -> SkipStep:
    return SkipStep(SkipConfig(**config), None, lambda: 7, 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [agreed(math.nan), agreed(math.inf), agreed(2.0, math.nan), agreed(2.0, math.inf)])
def test_what_is_not_finite_is_skipped_from_the_first_step_on(bad: Agreed) -> None:
    assert judge(skipper(), [bad, agreed(2.0)]) == ["not finite", ""]


def test_a_spike_is_told_from_the_recent_steps_once_there_are_enough() -> None:
    calm = [agreed(2.0 + 0.1 * (i % 2)) for i in range(6)]
    assert judge(skipper(spike_sigma=6.0, window=8), [*calm[:3], agreed(9.0)])[-1] == "", "three steps are too few"
    reasons = judge(skipper(spike_sigma=6.0, window=8), [*calm, agreed(9.0), agreed(2.1), agreed(2.0, norm=50.0)])
    assert reasons[:6] == [""] * 6
    assert reasons[6] == "loss above 2.35, the recent steps' mean and 6 deviations"
    assert reasons[7:] == ["", "gradient norm above 1, the recent steps' mean and 6 deviations"]
    assert judge(skipper(spike_sigma=0.0, window=8), [*calm, agreed(9.0)])[-1] == "", "0: spikes are taken"


def test_a_skipped_spike_does_not_raise_the_limit_for_the_next() -> None:
    skip = skipper(spike_sigma=3.0, window=4, most_in_window=4)
    assert [bool(reason) for reason in judge(skip, [agreed(2.0)] * 4 + [agreed(9.0)] * 2)] == [False] * 4 + [True] * 2


def test_the_line_that_ends_a_run_says_what_was_seen_and_what_to_change() -> None:
    *before, line = judge(skipper(most_in_a_row=2), [agreed(2.0), *[agreed(math.nan, 3.0)] * 3])
    assert before == ["", "not finite", "not finite"]
    assert line == (
        "step 4: loss nan, gradient norm 3: not finite; the last checkpoint is of step 7. Skipped before it: 2 steps in a row, "
        "2 of the last 128 (train.skip). Lower optim.lr (now 0.001) or clip (optim.clip_norm)"
    )


@given(
    bad=st.lists(st.booleans(), min_size=1, max_size=60),
    window=st.integers(1, 12),
    row=st.integers(0, 4),
    most=st.integers(0, 6),
)
def test_no_run_skips_more_than_it_may(bad: list[bool], window: int, row: int, most: int) -> None:
    skip = skipper(window=window, most_in_a_row=row, most_in_window=most)
    reasons = judge(skip, [agreed(math.nan if spoilt else 2.0) for spoilt in bad])
    ended = bool(reasons) and reasons[-1].startswith("step ")
    skipped = [step for step, reason in enumerate(reasons, start=1) if reason == "not finite"]
    for step in skipped:
        assert len([s for s in skipped if step - window < s <= step]) <= most
        assert any(earlier not in skipped for earlier in range(step - row, step + 1))
    if not ended:
        assert len(reasons) == len(bad), "and only then does a run end"
    else:
        here = [s for s in skipped if s > len(reasons) - window]
        assert len(here) == most or all(s in skipped for s in range(len(reasons) - row, len(reasons)))


@given(
    losses=st.lists(st.floats(0.1, 10.0) | st.just(math.nan), min_size=2, max_size=40),
    cut=st.integers(0, 40),
    sigma=st.sampled_from([0.0, 1.0, 3.0]),
)
def test_a_restored_judge_decides_as_the_one_that_went_on(losses: list[float], cut: int, sigma: float) -> None:
    figures = [agreed(loss, norm=loss / 2) for loss in losses]
    config = {"spike_sigma": sigma, "window": 6, "most_in_a_row": 100, "most_in_window": 100}
    going, early, late = skipper(**config), skipper(**config), skipper(**config)
    whole = judge(going, figures)
    before = judge(early, figures[:cut])
    late.restore(json.loads(json.dumps(early.state())))
    assert before + judge(late, figures[cut:], first=len(before) + 1) == whole
    assert json.dumps(late.state()) == json.dumps(going.state())


def test_the_limit_is_the_mean_and_so_many_deviations() -> None:
    assert spike_limit([1.0, 3.0], 2.0) == 4.0
    assert spike_limit([5.0], 100.0) == 5.0


@pytest.mark.multiprocess
def test_bad_figures_of_one_rank_are_skipped_by_all_and_change_nothing(tmp_path: Path) -> None:
    run_together(2, tmp_path, cases.bad_figures_of_one_rank_are_skipped_by_all, write_text(tmp_path / "text"), tmp_path)


@pytest.mark.multiprocess
def test_a_spike_after_a_resume_is_judged_by_the_steps_before_it(tmp_path: Path) -> None:
    run_together(
        2, tmp_path, cases.a_spike_after_a_resume_is_judged_by_the_steps_before_it, write_text(tmp_path / "text"), tmp_path
    )


@pytest.mark.multiprocess
def test_one_skipped_step_too_many_ends_the_run_on_every_rank(tmp_path: Path) -> None:
    run_together(2, tmp_path, cases.one_skipped_step_too_many_ends_the_run_everywhere, write_text(tmp_path / "text"), tmp_path)
