"""Composing: groups, profiles, experiments and the user's own configs come together as Hydra says, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcmoe.config.compose import compose, load
from hpcmoe.config.schema import Config, Precision
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.resources import resource_dir

GROUPS = ["cluster", "model", "layout", "data", "train", "optim", "checkpoint", "precision", "resilience", "logging", "notify"]


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (resource_dir("conf") / group).glob("*.yaml"))


def test_the_embedded_default_is_the_tiny_model_on_this_machine() -> None:
    config = validate(load())
    assert (config.cluster.name, config.model.name, config.nodes, config.gpus_per_node) == ("local", "tiny", 1, 4)
    assert (config.layout.dp_shard, config.layout.ep) == (4, 4)


@pytest.mark.parametrize(("group", "option"), [(group, option) for group in GROUPS for option in options(group)])
def test_every_option_of_every_group_composes(group: str, option: str) -> None:
    assert isinstance(load([f"{group}={option}"]), Config)


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes_and_can_run(experiment: str) -> None:
    assert validate(load([f"+experiment={experiment}"])).name == experiment


@pytest.mark.parametrize("cluster", ["local", "testbed", "leonardo"])
def test_a_profile_sets_nodes_and_slurm_words_and_the_command_line_wins(cluster: str) -> None:
    assert load([f"cluster={cluster}"]).gpus_per_node == 4
    config = load([f"cluster={cluster}", "gpus_per_node=2", "slurm.time=10"])
    assert (config.cluster.name, config.gpus_per_node, config.slurm.time) == (cluster, 2, "10")


def test_values_come_in_their_schema_type() -> None:
    config = load(["optim.lr=3", "slurm.time=30", "precision=bf16", "+env.OMP_NUM_THREADS=2", "+user.note={a:[1,x]}"])
    assert isinstance(config.optim.lr, float)
    assert config.slurm.time == "30"
    assert config.precision.name is Precision.bf16
    assert config.env == {"OMP_NUM_THREADS": "2"}
    assert config.user == {"note": {"a": [1, "x"]}}


def test_interpolations_are_resolved() -> None:
    assert load(["optim.warmup_steps=${train.steps}", "train.steps=7"]).optim.warmup_steps == 7


def test_a_config_dir_adds_groups_and_experiments_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [tiny]\nname: mine\nlayers: 2\n")
    (tmp_path / "experiment" / "exp.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: mine\n  - override /precision: bf16\ntrain:\n  steps: 3\n"
    )
    config = load(["+experiment=exp"], config_dir=str(tmp_path))
    assert (config.model.name, config.model.layers, config.model.hidden) == ("mine", 2, 64)
    assert (config.precision.name, config.train.steps) == (Precision.bf16, 3)


def test_the_command_line_wins_over_an_experiment() -> None:
    assert load(["+experiment=smoke", "train.steps=3"]).train.steps == 3


def test_a_root_config_of_the_users_own_starts_from_the_schema(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - config\n  - _self_\ntrain:\n  steps: 3\n")
    assert load(config_dir=str(tmp_path), config_name="mine").train.steps == 3
    (tmp_path / "bare.yaml").write_text("train:\n  steps: 3\n")
    with pytest.raises(UserError, match="does not start from the schema"):
        load(config_dir=str(tmp_path), config_name="bare")


def test_composing_writes_nothing_and_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load(["train.steps=3"])
    with pytest.raises(UserError):
        load(["train.stpes=3"])
    assert list(tmp_path.iterdir()) == []
    assert Path(os.getcwd()) == tmp_path


def test_hydras_own_node_is_there_for_sweepers_and_launchers() -> None:
    composed = compose(["model=tiny", "train.steps=3"])
    assert composed.hydra.runtime.choices.model == "tiny"
    assert list(composed.hydra.overrides.task) == ["model=tiny", "train.steps=3"]
