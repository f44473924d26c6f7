"""Points of a sweep share a plan only where the planner cannot tell them apart."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.planner import check
from hpcmoe.planner.check import NOT_PLANNED, ManyPlans, prepare
from hpcmoe.planner.plan import Plan


@pytest.fixture(scope="module")
def config() -> Config:
    return validate(load(["model=olmoe_1b_7b", "cluster=leonardo", "train=pretrain", "nodes=16", "slurm.account=me"]))


class Untouchable:
    """Whoever computes with it, compares it or looks into it fails."""

    def _fail(self, *_: object) -> NoReturn:
        raise AssertionError("the planner has looked at it")

    __bool__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __float__ = (
        _fail
    )
    __int__ = __str__ = __repr__ = __iter__ = __len__ = __getitem__ = __hash__ = _fail

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else AssertionError("the planner has looked into it")

    def __deepcopy__(self, memo: Any) -> Untouchable:
        return self


def test_what_is_left_out_of_a_plan_is_never_looked_at(config: Config) -> None:
    poisoned, clean = copy.deepcopy(config), copy.deepcopy(config)
    for key in NOT_PLANNED:
        owner, _, name = key.rpartition(".")
        assert hasattr(getattr(config, owner) if owner else config, name), key
        setattr(getattr(poisoned, owner) if owner else poisoned, name, Untouchable())
    made, plan = prepare(poisoned), prepare(clean)
    assert made is not None
    assert plan is not None
    assert (made.tokens_per_s, poisoned.slurm) == (plan.tokens_per_s, clean.slurm)


def test_one_plan_for_points_that_it_cannot_tell_apart(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Config] = []

    def noted(given: Config) -> Plan | None:
        made.append(given)
        return prepare(given)

    monkeypatch.setattr(check, "prepare", noted)
    planner, filled = ManyPlans(), []
    for number in range(3):
        point = copy.deepcopy(config)
        point.optim.lr, point.train.seed = 1e-4 * (number + 1), number
        speed = planner.prepare(point)
        filled.append((speed, point.slurm.partition, point.slurm.time))
    assert len(made) == 1
    assert len(set(filled)) == 1
    other = replace(copy.deepcopy(config), nodes=8)
    assert planner.prepare(validate(replace(other, layout=replace(other.layout, dp_shard=None)))) != filled[0][0]
    assert len(made) == 2


def test_what_cannot_run_is_refused_for_each_point(config: Config) -> None:
    planner = ManyPlans()
    for seed in range(2):
        point = copy.deepcopy(config)
        point.train.seed, point.slurm.time = seed, "90-00:00:00"
        with pytest.raises(UserError):
            planner.prepare(point)
