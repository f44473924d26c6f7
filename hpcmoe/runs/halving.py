"""Early stopping of a sweep's runs by asynchronous successive halving: who goes on at a rung, and who is promoted later. Pure.

ASHA, L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, arXiv:1810.05934, algorithm 2, with two
differences that a sweep of given points asks for: a run that is good enough when it reaches a rung goes on without leaving its
nodes; and where nobody else can reach a rung any more its best goes on, even if fewer than ``eta`` have reached it.

The figures are read and written by hpcmoe.runs.rungs; ranks ask at a rung, hpcmoe.runs.advance asks for promotions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Reached:
    """A run has reached a rung. ``value``: of the metric; None: not finite."""

    run_id: str
    rung: int  # counted from 1
    step: int
    value: float | None


class Course(StrEnum):
    """What may still be expected of a run."""

    COMING = "coming"  # it runs, waits, or will be brought back
    PAUSED = "paused"  # it left at a rung
    DONE = "done"  # it made all its steps
    GONE = "gone"  # failed, cancelled, stopped by its user, or unknown: its place at a rung is another's


@dataclass(frozen=True)
class Whereabouts:
    course: Course
    rung: int = 0  # PAUSED: at which


@dataclass(frozen=True)
class Place:
    """A run's place among those that have reached a rung."""

    rank: int  # 1: the best
    of: int
    go_on: int  # how many of them do
    finite: bool = True

    @property
    def goes_on(self) -> bool:
        return self.finite and self.rank <= self.go_on

    def words(self, eta: int) -> str:
        """5th of 7, the best 2 go on"""
        if not self.finite:
            return "its metric is not finite"
        rule = f"nobody goes on before there are {eta}" if self.go_on == 0 else f"the best {self.go_on} go on"
        return f"{ordinal(self.rank)} of {self.of}, {'only the best goes on' if self.go_on == 1 else rule}"


@dataclass(frozen=True)
class Promotion:
    """A paused run that goes on after all."""

    run_id: str
    rung: int
    step: int
    reason: str


def rung_steps(first: int, eta: int, steps: int) -> tuple[int, ...]:
    """The step of every rung: each ``eta`` times the one before, all below ``steps``, where a run is done."""
    found = []
    while first < steps:
        found.append(first)
        first *= eta
    return tuple(found)


def place_of(reached: Iterable[Reached], run_id: str, rung: int, eta: int, mode: Mode) -> Place:
    """Of a run that is among ``reached``, at this rung."""
    here = _by_rung(reached).get(rung, {})
    ranked = _ranked(here.values(), mode)
    own = here[run_id]
    return Place(ranked.index(own) + 1, len(ranked), len(ranked) // eta, own.value is not None)


def promotions(reached: Iterable[Reached], runs: Mapping[str, Whereabouts], eta: int, mode: Mode) -> list[Promotion]:
    """The paused runs that should go on now, lowest rung first, the best first. ``runs``: every run of the sweep.

    At each rung the best n // eta of the n that have reached it go on; of those that are GONE the places are the next ones'.
    """
    rungs = _by_rung(reached)
    highest = {run_id: rung for rung in sorted(rungs) for run_id in rungs[rung]}
    found: list[Promotion] = []
    complete = True  # nobody can come to this rung any more
    for rung in range(1, max(rungs, default=0) + 1):
        here = rungs.get(rung, {})
        complete = complete and not any(
            where.course is Course.COMING and highest.get(run_id, 0) < rung for run_id, where in runs.items()
        )
        places = len(here) // eta or (1 if complete else 0)
        present = [one for one in here.values() if _course(runs, one.run_id) is not Course.GONE and one.value is not None]
        best = _ranked(present, mode)[:places]
        now = [one for one in best if runs.get(one.run_id) == Whereabouts(Course.PAUSED, rung)]
        found += [Promotion(one.run_id, rung, one.step, _why(best.index(one), len(here), eta, complete)) for one in now]
        complete = complete and not now
    return found


def _course(runs: Mapping[str, Whereabouts], run_id: str) -> Course:
    return runs[run_id].course if run_id in runs else Course.GONE


def _why(index: int, of: int, eta: int, complete: bool) -> str:
    if of < eta and complete:
        return f"the best of the {of} that have reached this rung, and nobody else will" if of > 1 else "nobody else will come"
    return f"{ordinal(index + 1)} of {of} by now, the best {of // eta} go on" if of // eta > 1 else f"the best of {of} by now"


def _by_rung(reached: Iterable[Reached]) -> dict[int, dict[str, Reached]]:
    """Each run once a rung: an attempt that made the rung's step again may have told the same once more. The first counts."""
    rungs: dict[int, dict[str, Reached]] = {}
    for one in reached:
        rungs.setdefault(one.rung, {}).setdefault(one.run_id, one)
    return rungs


def _ranked(reached: Iterable[Reached], mode: Mode) -> Sequence[Reached]:
    """The best first; what is not finite last; equals by their ids, so that the order in which they came does not matter."""

    def key(one: Reached) -> tuple[bool, float, str]:
        value = one.value or 0.0
        return one.value is None, value if mode == "min" else -value, one.run_id

    return sorted(reached, key=key)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th"""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
