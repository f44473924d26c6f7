"""Config files read through libyaml mean what OmegaConf says they mean, and a wrong one is described in OmegaConf's words."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from omegaconf import OmegaConf

from hpcmoe.config.compose import load, opened_hydra
from hpcmoe.config.source import FastFileConfigSource
from hpcmoe.errors import UserError
from hpcmoe.resources import resource_dir

pytestmark = pytest.mark.skipif(not getattr(yaml, "__with_libyaml__", False), reason="PyYAML was built without libyaml")

TEXTS = [
    "",
    "# nothing\n",
    "just text\n",
    "- a\n- {b: [1, 2]}\n",
    "# @package _global_\ndefaults:\n  - _self_\na: ${b}\nb: 1\n",
    "lr: 1e-4\nbig: 1e4\nday: 2020-01-01\nclock: 12:30:00\nyes_: yes\nbin: 0b11\nnone: ~\n1: 2\ninf: .inf\n",
    "base: &b {x: 1}\nother: {<<: *b, y: 2}\npath: !!python/object/apply:pathlib.Path [a, b]\né: ü😀\n",
]
WRONG = ["a: 1\na: 2\n", "a: [1,\nb: 2\n", "a: b: c\n", "\ta: 1\n", "a: *x\n", "a: !!python/name:os.system\n"]


def source(kind: type[FileConfigSource], directory: Path) -> FileConfigSource:
    return kind(provider="main", path=f"file://{directory}")


@pytest.mark.parametrize("path", sorted(resource_dir("conf").rglob("*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_config_of_ours_is_read_as_hydra_reads_it(path: Path) -> None:
    fast, slow = (source(kind, path.parent).load_config(path.stem) for kind in (FastFileConfigSource, FileConfigSource))
    assert fast == slow
    assert OmegaConf.to_yaml(fast.config) == OmegaConf.to_yaml(slow.config)


@pytest.mark.parametrize("text", TEXTS)
def test_unusual_yaml_is_read_as_hydra_reads_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    fast, slow = (source(kind, tmp_path).load_config("x") for kind in (FastFileConfigSource, FileConfigSource))
    assert (fast, type(fast.config)) == (slow, type(slow.config))


@pytest.mark.parametrize("text", WRONG)
def test_wrong_yaml_is_refused_in_hydras_words_with_the_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    said = []
    for kind in (FastFileConfigSource, FileConfigSource):
        with pytest.raises(yaml.YAMLError) as refused:
            source(kind, tmp_path).load_config("x")
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_a_users_files_are_read_through_it_and_a_key_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [tiny]\nname: mine\nlayers: 2\nname: again\n", encoding="utf-8")
    with opened_hydra(str(tmp_path)) as hydra:
        kinds = [type(one) for one in hydra.config_loader.get_sources() if one.scheme() == "file"]
    assert kinds == [FastFileConfigSource, FastFileConfigSource]
    with pytest.raises(UserError, match=r"mine\.yaml.*, line 4: not valid YAML: found duplicate key name"):
        load(["model=mine"], str(tmp_path))
