"""A frozen config is read back as it was, whatever its text holds; one from another version says so."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcmoe.config.compose import load
from hpcmoe.config.freeze import freeze, load_frozen, to_plain, to_yaml
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError


@pytest.mark.parametrize("model", ["tiny", "mixtral_8x7b", "deepseek_v3", "gpt_oss_20b"])
@pytest.mark.parametrize("cluster", ["local", "leonardo"])
def test_freezing_and_reading_give_the_same_config(tmp_path: Path, model: str, cluster: str) -> None:
    config = load([f"model={model}", f"cluster={cluster}", "precision=bf16"])
    freeze(config, tmp_path / "config.yaml")
    assert load_frozen(tmp_path / "config.yaml") == config


AWKWARD = [
    "${HOME}",
    "\\${x}",
    "\\\\${x}",
    "a: b",
    "yes",
    "1e-8",
    "0x1f",
    "'\"$`\\",
    "line\nbreak",
    "",
    " ",
    "ü",
    "${",
    "$",
    "null",
    "~",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_text_is_never_taken_for_something_else(tmp_path: Path, text: str) -> None:
    config = load()
    config.env["X"] = text
    config.user["note"] = [text, {"inside": text}]
    freeze(config, tmp_path / "config.yaml")
    again = load_frozen(tmp_path / "config.yaml")
    assert again.env == config.env
    assert again.user == config.user


BASE = load()


@settings(deadline=None, max_examples=60)
@given(lr=st.floats(min_value=1e-300, max_value=1e300), text=st.text(alphabet="ab\\${}:'\" #-\n", max_size=12))
def test_every_number_and_every_text_survive(tmp_path_factory: pytest.TempPathFactory, lr: float, text: str) -> None:
    path = tmp_path_factory.mktemp("frozen") / "config.yaml"
    config = copy.deepcopy(BASE)
    config.optim.lr = lr
    config.env["X"] = text
    freeze(config, path)
    again = load_frozen(path)
    assert (again.optim.lr, again.env["X"]) == (lr, text)


def test_reading_back_does_not_look_at_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCMOE_TEST_NAME", "then")
    freeze(load(["name=${oc.env:HPCMOE_TEST_NAME}"]), tmp_path / "config.yaml")
    monkeypatch.setenv("HPCMOE_TEST_NAME", "now")
    assert load_frozen(tmp_path / "config.yaml").name == "then"


def test_a_key_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load()).replace("warmup_steps:", "warmup_step:"))
    with pytest.raises(UserError, match=r"config.yaml is from another version of hpcmoe: no config key 'optim.warmup_step'"):
        load_frozen(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nodes: two\n", "nodes: Value 'two'"),
        ("[1]\n", "is not a frozen config"),
        ("", "is not a frozen config"),
        ("a: [\n", "is not valid YAML"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError) as raised:
        load_frozen(tmp_path / "config.yaml")
    assert line in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*config\.yaml"):
        load_frozen(tmp_path / "config.yaml")


def test_the_frozen_file_holds_only_plain_values() -> None:
    plain = to_plain(validate(load(["precision=bf16"])))
    assert plain["precision"]["name"] == "bf16"
    assert plain["layout"]["dp_shard"] == 4
