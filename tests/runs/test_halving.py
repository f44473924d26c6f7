"""Asynchronous successive halving: whoever comes when, and whatever becomes of the others, the right runs go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.runs.halving import (
    Course,
    Mode,
    Promotion,
    Reached,
    Whereabouts,
    ordinal,
    place_of,
    promotions,
    rung_steps,
)

RUNGS = 3
values = st.one_of(st.none(), st.integers(-3, 3).map(float), st.floats(-1e3, 1e3))


def reached(*figures: float | None, rung: int = 1) -> list[Reached]:
    return [Reached(f"run{index}", rung, 100, value) for index, value in enumerate(figures)]


def everyone(course: Course, count: int, rung: int = 0) -> dict[str, Whereabouts]:
    return {f"run{index}": Whereabouts(course, rung) for index in range(count)}


def test_rungs_grow_by_the_factor_and_stay_below_the_last_step() -> None:
    assert rung_steps(100, 2, 1000) == (100, 200, 400, 800)
    assert rung_steps(100, 3, 900) == (100, 300)
    assert rung_steps(100, 3, 100) == ()


def test_a_run_goes_on_that_is_among_the_best_so_many_of_those_that_came() -> None:
    came = reached(3.0, 1.0, 2.0, 5.0, 4.0, 7.0, 6.0)
    places = [place_of(came, f"run{index}", 1, 3, "min") for index in range(7)]
    assert [place.rank for place in places] == [3, 1, 2, 5, 4, 7, 6]
    assert [place.goes_on for place in places] == [False, True, True, False, False, False, False]
    assert places[3].words(3) == "5th of 7, the best 2 go on"
    assert place_of(came, "run5", 1, 3, "max").rank == 1


def test_the_words_fit_few_runs_and_values_that_are_none() -> None:
    assert place_of(reached(1.0, 2.0), "run0", 1, 3, "min").words(3) == "1st of 2, nobody goes on before there are 3"
    assert place_of(reached(1.0, 2.0, 3.0), "run1", 1, 3, "min").words(3) == "2nd of 3, only the best goes on"
    nan = place_of(reached(1.0, None, 3.0), "run1", 1, 3, "min")
    assert (nan.rank, nan.goes_on, nan.words(3)) == (3, False, "its metric is not finite")
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]
    )


def test_a_paused_run_is_promoted_when_more_have_come() -> None:
    came = reached(2.0, 3.0, 1.0)
    runs = everyone(Course.PAUSED, 2, rung=1) | {"run2": Whereabouts(Course.COMING), "run3": Whereabouts(Course.COMING)}
    assert promotions(came, runs, 3, "min") == []
    more = [*came, Reached("run3", 1, 100, 4.0), *(Reached(f"late{n}", 1, 100, 9.0) for n in range(2))]
    assert promotions(more, runs, 3, "min") == [Promotion("run0", 1, 100, "2nd of 6 by now, the best 2 go on")]


def test_the_best_goes_on_alone_where_nobody_else_can_come() -> None:
    runs = everyone(Course.PAUSED, 2, rung=1)
    came = reached(2.0, 1.0)
    assert promotions(came, runs | {"run2": Whereabouts(Course.COMING)}, 3, "min") == []
    (promoted,) = promotions(came, runs | {"run2": Whereabouts(Course.GONE)}, 3, "min")
    assert (promoted.run_id, promoted.reason) == ("run1", "the best of the 2 that have reached this rung, and nobody else will")


def test_the_place_of_a_run_that_failed_is_the_next_ones() -> None:
    runs = everyone(Course.PAUSED, 3, rung=1) | {"run0": Whereabouts(Course.GONE)}
    assert [one.run_id for one in promotions(reached(1.0, 2.0, 3.0), runs, 3, "min")] == ["run1"]
    assert promotions(reached(1.0, 2.0, 3.0), runs | {"run1": Whereabouts(Course.DONE)}, 3, "min") == []


def test_nobody_whose_metric_is_not_finite_goes_on() -> None:
    assert promotions(reached(None, None, None), everyone(Course.PAUSED, 3, rung=1), 3, "min") == []


@given(st.lists(values, max_size=12), st.integers(2, 4), st.sampled_from(["min", "max"]), st.randoms(use_true_random=False))
def test_neither_order_nor_repeated_reports_change_who_is_promoted(
    figures: list[float | None], eta: int, mode: Mode, chance: Random
) -> None:
    came = reached(*figures)
    runs = everyone(Course.PAUSED, len(figures), rung=1) | {"late": Whereabouts(Course.COMING)}
    wanted = {one.run_id for one in promotions(came, runs, eta, mode)}
    again = [*came, *chance.choices(came, k=len(came) // 2)] if came else []
    chance.shuffle(again)
    assert {one.run_id for one in promotions(again, runs, eta, mode)} == wanted
    assert len(wanted) <= len(figures) // eta
    finite = [one for one in came if one.value is not None]
    assert len(wanted) == min(len(figures) // eta, len(finite))
    assert {one.run_id for one in came if place_of(again, one.run_id, 1, eta, mode).goes_on} == wanted


@dataclass
class Sweep:
    """Runs that come to their rungs in any order, as the engine and `advance` would treat them."""

    figures: dict[str, list[float | None]]  # by run, at each rung
    dies: set[tuple[str, int]]  # before reaching this rung (RUNGS + 1: after the last)
    eta: int
    mode: Mode
    reached: list[Reached] = field(default_factory=list)
    runs: dict[str, Whereabouts] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs = {run: Whereabouts(Course.COMING) for run in self.figures}
        self.at = dict.fromkeys(self.figures, 0)  # rungs that were passed

    def move(self, run: str) -> None:
        rung = self.at[run] + 1
        if (run, rung) in self.dies:
            self.runs[run] = Whereabouts(Course.GONE)
        elif rung > RUNGS:
            self.runs[run] = Whereabouts(Course.DONE)
        else:
            self.reached.append(Reached(run, rung, 10 * self.eta**rung, self.figures[run][rung - 1]))
            if place_of(self.reached, run, rung, self.eta, self.mode).goes_on:
                self._go_on(run, rung)
            else:
                self.runs[run] = Whereabouts(Course.PAUSED, rung)

    def _go_on(self, run: str, rung: int) -> None:
        came = [one for one in self.reached if one.rung == rung]
        complete = len(came) < self.eta and not any(
            where.course is Course.COMING and self.at[other] < rung - 1 for other, where in self.runs.items()
        )
        assert len(came) // self.eta >= 1 or complete
        self.at[run] = rung
        self.runs[run] = Whereabouts(Course.COMING)

    def advance(self) -> bool:
        """Promote as `advance` does; True when somebody was."""
        promoted = promotions(self.reached, self.runs, self.eta, self.mode)
        for rung in {one.rung for one in promoted}:
            here = len({one.run_id for one in self.reached if one.rung == rung})
            assert sum(one.rung == rung for one in promoted) <= max(1, here // self.eta)
        for one in promoted:
            assert self.runs[one.run_id] == Whereabouts(Course.PAUSED, one.rung)
            self._go_on(one.run_id, one.rung)
        return bool(promoted)


@given(
    st.lists(st.lists(values, min_size=RUNGS, max_size=RUNGS), min_size=1, max_size=12),
    st.sets(st.tuples(st.integers(0, 11), st.integers(1, RUNGS + 1)), max_size=6),
    st.integers(2, 4),
    st.sampled_from(["min", "max"]),
    st.randoms(use_true_random=False),
)
def test_whatever_happens_no_run_is_forgotten_that_should_go_on(
    figures: list[list[float | None]], dies: set[tuple[int, int]], eta: int, mode: Mode, chance: Random
) -> None:
    names = [f"run{index:02}" for index in range(len(figures))]
    doomed = {(names[index], rung) for index, rung in dies if index < len(names)}
    sweep = Sweep(dict(zip(names, figures, strict=True)), doomed, eta, mode)
    for _ in range(10 * RUNGS * len(names) + 10):  # it ends
        coming = [run for run, where in sweep.runs.items() if where.course is Course.COMING]
        if coming and chance.random() < 0.8:
            sweep.move(chance.choice(coming))
        elif not sweep.advance() and not coming:
            break
    else:
        pytest.fail("it never ends")
    for rung in range(1, RUNGS + 1):
        here = [one for one in sweep.reached if one.rung == rung]
        ranked = sorted(here, key=lambda one: place_of(here, one.run_id, rung, eta, mode).rank)
        alive = [one for one in ranked if sweep.runs[one.run_id].course is not Course.GONE and one.value is not None]
        for one in alive[: max(1, len(here) // eta)]:
            assert sweep.at[one.run_id] >= rung, "neither the best nor one of the best so many may be left behind"
    finite = [run for run in names if not any(name == run for name, _ in doomed) and None not in sweep.figures[run]]
    if len(finite) == len(names):
        assert any(where.course is Course.DONE for where in sweep.runs.values()), "somebody makes all the steps"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_when_all_come_in_the_best_order_only_one_in_eta_goes_on(mode: Mode) -> None:
    figures = [float(n if mode == "min" else -n) for n in range(27)]
    passed = [place_of(reached(*figures[: count + 1]), f"run{count}", 1, 3, mode).goes_on for count in range(len(figures))]
    promoted = promotions(reached(*figures), everyone(Course.PAUSED, 27, rung=1), 3, mode)
    assert sum(passed) == 0, "each is worse than all before it"
    assert [one.run_id for one in promoted] == [f"run{n}" for n in range(9)]
