"""Learning rate and batch size as functions of progress: no jumps, within their bounds, ending where they should."""

from __future__ import annotations

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

from hpcmoe.config.schema import BatchWarmupConfig, OptimConfig, TrainConfig
from hpcmoe.engine.schedule import batch_stairs, batch_tokens, learning_rate

SCHEDULES = st.sampled_from(["cosine", "wsd", "constant"])


@st.composite
def courses(draw: st.DrawFn) -> tuple[list[float], int, OptimConfig]:
    """All rates of a run."""
    steps = draw(st.integers(1, 300))
    optim = OptimConfig(
        lr=draw(st.floats(1e-6, 1.0)),
        schedule=draw(SCHEDULES),
        warmup_steps=draw(st.integers(0, 400)),
        decay_steps=draw(st.none() | st.integers(1, 400)),
        min_lr_ratio=draw(st.floats(0.0, 1.0)),
    )
    return [learning_rate(step, steps, optim) for step in range(1, steps + 1)], steps, optim


@given(courses())
def test_a_rate_is_never_above_its_peak_nor_after_the_warm_up_below_its_floor(
    course: tuple[list[float], int, OptimConfig],
) -> None:
    rates, _, optim = course
    assert all(0 < rate <= optim.lr * (1 + 1e-12) or optim.lr * optim.min_lr_ratio == 0 == rate for rate in rates)
    assert all(rate >= optim.lr * optim.min_lr_ratio * (1 - 1e-12) for rate in rates[optim.warmup_steps :])


@given(courses())
def test_a_rate_rises_to_its_peak_and_then_never_rises_again(course: tuple[list[float], int, OptimConfig]) -> None:
    rates, steps, optim = course
    peak = min(optim.warmup_steps, steps)
    assert rates[:peak] == sorted(rates[:peak])
    if 0 < optim.warmup_steps <= steps:
        assert rates[optim.warmup_steps - 1] == optim.lr
    after = rates[optim.warmup_steps :]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(after))


@given(courses())
def test_a_rate_makes_no_jump(course: tuple[list[float], int, OptimConfig]) -> None:
    """No step changes it by more than the steepest part of its course may."""
    rates, steps, optim = course
    left = max(1, steps - optim.warmup_steps)
    decay = {"cosine": left, "wsd": min(left, optim.decay_steps or max(1, steps // 10)), "constant": left}[optim.schedule]
    steepest = optim.lr * max(1 / max(1, optim.warmup_steps), 1.6 / decay)  # a cosine is at most pi / 2 times as steep as a line
    assert all(abs(b - a) <= steepest * (1 + 1e-9) for a, b in itertools.pairwise(rates))


@given(courses())
def test_a_rate_ends_at_its_floor(course: tuple[list[float], int, OptimConfig]) -> None:
    rates, steps, optim = course
    assume(optim.warmup_steps < steps)
    floor = optim.lr if optim.schedule == "constant" else optim.lr * optim.min_lr_ratio
    assert rates[-1] == floor


def test_a_stable_phase_is_stable() -> None:
    optim = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=10, decay_steps=20)
    assert {learning_rate(step, 100, optim) for step in range(10, 81)} == {1.0}
    assert learning_rate(81, 100, optim) < 1.0


@st.composite
def growing(draw: st.DrawFn) -> TrainConfig:
    start, stair = draw(st.integers(1, 50)), draw(st.none() | st.integers(1, 20))
    whole = start + draw(st.integers(1, 12)) * (stair or start)
    warmup = BatchWarmupConfig(start, stair, draw(st.integers(1, 5000)))
    return TrainConfig(steps=1, seq_len=1, global_batch_tokens=whole, batch_warmup=warmup)


@given(growing())
def test_a_batch_grows_by_its_stairs_from_start_to_whole(train: TrainConfig) -> None:
    warmup = train.batch_warmup
    stair = warmup.increment_tokens or warmup.start_tokens
    stairs = batch_stairs(train)
    assert (stairs[0], stairs[-1]) == (warmup.start_tokens, train.global_batch_tokens)
    assert {b - a for a, b in itertools.pairwise(stairs)} == {stair}
    sizes = [batch_tokens(trained, train) for trained in range(warmup.tokens + 1)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (warmup.start_tokens, train.global_batch_tokens)
    assert set(sizes) <= set(stairs)
    if warmup.tokens >= len(stairs):
        assert set(sizes) == set(stairs), "none is left out"
        held = [sizes.count(size) for size in stairs[:-1]]
        assert max(held) - min(held) <= 1, "each for as many tokens"


@given(st.integers(0, 10**15))
def test_without_a_warm_up_the_batch_is_whole_from_the_start(trained: int) -> None:
    assert batch_tokens(trained, TrainConfig(steps=1, seq_len=1, global_batch_tokens=4096)) == 4096
