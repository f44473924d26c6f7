"""The layout of an elastic run's attempt where the cluster's memory and queues are known."""

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.planner.check import prepare
from hpcmoe.planner.elastic import lay_out

LEONARDO = [
    "cluster=leonardo",
    "slurm.account=x",
    "model=qwen3_30b_a3b",
    "train.seq_len=4096",
    f"train.global_batch_tokens={4096 * 96}",
]


def elastic(*overrides: str) -> Config:
    return validate(load([*LEONARDO, *overrides]))


def test_where_the_usual_choice_fits_an_attempt_has_the_layout_of_a_plain_run_of_that_size() -> None:
    config = elastic("nodes=3..4", "layout.recompute=full")
    plain = validate(load([*LEONARDO, "nodes=4", "layout.recompute=full"]))
    assert lay_out(config, 4) == plain


def test_where_it_does_not_fit_the_planner_searches_what_is_open() -> None:
    config = elastic("nodes=3..4", "layout.recompute=selective")
    usual = validate(load([*LEONARDO, "nodes=4", "layout.recompute=selective"]))
    with pytest.raises(UserError, match="impossible: memory: "):
        prepare(usual)
    chosen = lay_out(config, 4)
    prepare(chosen)
    assert chosen.layout.recompute == "selective"


def test_counts_on_which_nothing_fits_are_named() -> None:
    with pytest.raises(UserError, match=r"nodes=3\.\.4: .* and 3 cannot be used \(impossible: memory: "):
        prepare(elastic("nodes=3..4", "layout.recompute=selective"))


def test_the_queue_must_take_every_count() -> None:
    with pytest.raises(UserError, match="boost_qos_bprod starts at"):
        prepare(elastic("nodes=3..4", "layout.recompute=full", "slurm.qos=boost_qos_bprod"))
