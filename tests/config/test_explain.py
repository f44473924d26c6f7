"""Every mistake in a key, a value or a file leaves as one line that names it and says what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcmoe.config.compose import load
from hpcmoe.errors import UserError

MISTAKES = [
    # a wrong key
    ("optim.lrr=1", "no config key 'optim.lrr'; did you mean 'optim.lr'? valid in optim: name, lr, betas"),
    ("train.step=1", "no config key 'train.step'; did you mean 'train.steps'?"),
    ("slurm.tme=1", "no config key 'slurm.tme'; did you mean 'slurm.time'?"),
    ("+optim.lrr=1", "no config key 'optim.lrr'; did you mean 'optim.lr'?"),
    ("++optim.lrr=1", "no config key 'optim.lrr'; did you mean 'optim.lr'?"),
    # a key without its group, a key in the wrong group
    ("lr=1", "no config key 'lr'; did you mean 'optim.lr'?"),
    ("seed=1", "no config key 'seed'; did you mean 'train.seed'?"),
    ("time=1", "no config key 'time'; did you mean 'slurm.time'?"),
    ("train.lr=1", "no config key 'train.lr'; did you mean 'optim.lr'?"),
    ("slurm.nodes=2", "no config key 'slurm.nodes'; did you mean 'nodes'?"),
    ("nodez=2", "no config key 'nodez'; did you mean 'nodes'?"),
    ("zzz=2", "no config key 'zzz'; valid at the top: name, nodes"),
    ("+zzz=2", "no config key 'zzz'; valid at the top: name, nodes"),
    # keys that users choose
    ("env.X=1", "no config key 'env.X' yet; to add it: +env.X=VALUE"),
    ("user.note=1", "no config key 'user.note' yet; to add it: +user.note=VALUE"),
    # groups
    ("model=tinny", "no model 'tinny'; did you mean 'tiny'? valid: "),
    ("cluster=leonarda", "no cluster 'leonarda'; did you mean 'leonardo'?"),
    ("modle=tiny", "no config key 'modle'; did you mean 'model'?"),
    ("experiment=smoke", "experiments are added: write +experiment=NAME"),
    ("+experiment=smok", "no experiment 'smok'; did you mean 'smoke'?"),
    ("+model=tiny", "model is chosen already: write it without the +"),
    ("optim/scale=x", "no config group 'optim/scale' is in use; to add one: +optim/scale=OPTION"),
    ("hydra/launcher=none", "no hydra/launcher 'none'; valid: "),
    ("~model", "model.name is not given (and 9 more); set model.name=VALUE, or choose a group option that does"),
    # a wrong type
    ("nodes=two", "nodes=two: not a whole number"),
    ("nodes=1.5", "nodes=1.5: not a whole number"),
    ("optim.lr=fast", "optim.lr=fast: not a number"),
    ("logging.tensorboard=maybe", "logging.tensorboard=maybe: not true or false"),
    ("optim.lr=null", "optim.lr: null is not a value here; a value must be given"),
    ("precision.name=bf17", "precision.name: no such value 'bf17'; did you mean 'bf16'? valid: fp32, bf16, fp8"),
    ("slurm.extra=--foo", "slurm.extra=--foo: a list is wanted, such as slurm.extra=[...]"),
    ("model.mla.kv_lora_rank=512", "a group such as model.mla is null here, and overrides cannot fill it"),
    ("model.mla={kv_lora_rank:512}", "model.mla is null here, and overrides cannot fill it"),
    ("train.steps=???", "train.steps is not given; set train.steps=VALUE"),
    # grammar
    ("optim.betas=[1,", "cannot read override 'optim.betas=[1,'"),
    ("nodes", "cannot read override 'nodes'"),
    ("=3", "a group's option is a name"),
    ("model=3", "a group's option is a name: write group=option, or group.key=value"),
    ("+nodes=3", "nodes exists already: write it without the +"),
    ("optim.lr=1,2", "optim.lr=1,2: several values; -m sweeps over them"),
    ("~optim.lr", "~optim.lr: "),
    ("~nodes=7", "The value of 'nodes' is 1 and not 7"),
    # interpolations
    ("optim.lr=${nope}", "optim.lr: interpolation key 'nope' not found"),
    ("name=${oc.env:HPCMOE_SURELY_NOT_SET}", "HPCMOE_SURELY_NOT_SET"),
    ("optim.lr=${optim.warmup_steps", "cannot read override"),
]


@pytest.mark.parametrize(("override", "line"), MISTAKES, ids=[override for override, _ in MISTAKES])
def test_a_mistake_in_an_override_is_one_line(override: str, line: str) -> None:
    with pytest.raises(UserError) as raised:
        load([override])
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


FILES = [
    ("train:\n  stpes: 3\n", "in config 'experiment/mine': no config key 'train.stpes'; did you mean 'train.steps'?"),
    ("train:\n  steps: three\n", "in config 'experiment/mine': train.steps=three: not a whole number"),
    ("train: [1]\n", "in config 'experiment/mine': "),
    ("train:\n  steps: 3\n steps: 4\n", "mine.yaml, line 4: not valid YAML: "),
    ("train:\n  steps: [3\n", "mine.yaml, line 4: not valid YAML: "),
    ("train:\n  steps: 3\n  steps: 4\n", "mine.yaml, line 4: not valid YAML: found duplicate key steps"),
    ("defaults:\n  - override /model: tinny\n", "no model 'tinny'; did you mean 'tiny'?"),
    ("defaults:\n  - override /modle: tiny\n", "modle"),
]


@pytest.mark.parametrize(("text", "line"), FILES, ids=[text for text, _ in FILES])
def test_a_mistake_in_a_users_file_names_the_file(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    with pytest.raises(UserError) as raised:
        load(["+experiment=mine"], config_dir=str(tmp_path))
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_config_dir_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config directory '.*/nowhere' does not exist"):
        load(config_dir=str(tmp_path / "nowhere"))


def test_a_root_config_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match="no config 'mine' found in conf/ or --config-dir"):
        load(config_name="mine")


def test_hydras_full_error_switch_shows_the_whole_story(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.errors import ConfigCompositionException

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigCompositionException):
        load(["optim.lrr=1"])
