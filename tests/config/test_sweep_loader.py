"""Points that are copied from a composed one must be what Hydra would have composed, to the last flag of the last node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig

from hpcmoe.config.compose import opened_hydra
from hpcmoe.config.sweep_loader import SweepLoader

FIXED = ["model=tiny", "cluster=testbed"]


def anatomy(node: Any) -> Any:
    """Everything that OmegaConf knows of a node but its parent."""
    metadata = node._metadata
    own = (type(node), {k: v for k, v in vars(metadata).items() if k not in ("flags", "resolver_cache")}, metadata.flags or {})
    if isinstance(node, DictConfig) and isinstance(node._content, dict):
        return own, [(key, anatomy(inner)) for key, inner in node._content.items()]
    if isinstance(node, ListConfig) and isinstance(node._content, list):
        return own, [anatomy(inner) for inner in node._content]
    return own, node._content if isinstance(node, (DictConfig, ListConfig)) else node._val


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The overrides that Hydra itself composed."""
    composed: list[tuple[str, ...]] = []
    original = ConfigLoaderImpl.load_sweep_config

    def load(self: ConfigLoaderImpl, master: DictConfig, overrides: list[str]) -> DictConfig:
        composed.append(tuple(overrides))
        return original(self, master, overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", load)
    return composed


@pytest.fixture(scope="module")
def hydra(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hydra]:
    """With a config of a user's own, which has what points might stumble over."""
    tmp_path = tmp_path_factory.mktemp("conf")
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "odd.yaml").write_text(
        "# @package _global_\nuser:\n  lr: ${optim.lr}\n  note: ${hydra:job.override_dirname}\n  list: [1, 2]\n"
        "  deep: {x: 1, y: '???'}\n  now: ${now:%f}\n  name: null\n"
    )
    (tmp_path / "name").mkdir()  # a group with the name of a key
    (tmp_path / "name" / "first.yaml").write_text("# @package _global_\nuser:\n  named: first\n")
    with opened_hydra(str(tmp_path)) as opened:
        yield opened


def points(hydra: Hydra, *point_overrides: list[str]) -> list[tuple[DictConfig, DictConfig]]:
    """Each point as made by our loader, and by Hydra's; the master's ``now`` has been read by then."""
    words = [*FIXED, "+experiment=odd"]
    master = hydra.compose_config("config", words, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
    assert master.user.now
    fast, slow = hydra.config_loader, ConfigLoaderImpl(hydra.config_loader.get_search_path())
    assert isinstance(fast, SweepLoader)
    made = [fast.load_sweep_config(master, list(overrides)) for overrides in point_overrides]
    return [(one, slow.load_sweep_config(master, list(overrides))) for one, overrides in zip(made, point_overrides, strict=True)]


CASES = {
    "numbers": [[*FIXED, f"optim.lr={lr}", f"train.seed={seed}"] for lr, seed in (("1e-4", 0), ("3e-4", 1))],
    "kinds of scalars": [[f"user.lr={text}", "+experiment=odd"] for text in ("1", "true", "null", "'a, b'")],
    "a number where there was null": [["optim.decay_steps=null"], ["optim.decay_steps=3"]],
    "interpolations": [["+experiment=odd", f"optim.lr={text}"] for text in ("1", "${user.deep.x}")],
    "mandatory values": [["+experiment=odd", f"user.deep.y={text}"] for text in ("1", "???")],
    "lists and mappings": [["+experiment=odd", f"user.list=[{n}]", f"user.deep={{x: {n}}}"] for n in (1, 2)],
    "a mapping's key, and the mapping": [["+experiment=odd", f"user.deep={{x: {n}}}", f"user.deep.x={n + 5}"] for n in (1, 2)],
    "added, forced and removed keys": [
        ["+experiment=odd", f"+user.a={n}", f"++user.b={n}", "~user.list", f"optim.lr={n}"] for n in (1, 2)
    ],
    "a key given twice": [[f"optim.lr={n}", f"optim.lr={n + 1}"] for n in (1, 2)],
    "an added key, then set": [[f"+user.a={n}", f"user.a={n + 1}"] for n in (1, 2)],
    "groups": [[f"model={model}", "optim.lr=1"] for model in ("tiny", "mixtral_8x7b")],
    "a group with the name of a key": [["+name=first", f"train.seed={n}"] for n in (1, 2)],
    "another order": [["optim.lr=1", "train.seed=2"], ["train.seed=3", "optim.lr=4"]],
    "hydra's own keys": [[f"hydra.job.name={name}", "optim.lr=1"] for name in ("a", "b")],
    "excluded from the directory's name": [
        ["hydra.job.config.override_dirname.exclude_keys=[train.seed]", f"train.seed={seed}", "optim.lr=1"] for seed in (1, 2)
    ],
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_point_is_what_hydra_composes(hydra: Hydra, case: str) -> None:
    for made, composed in points(hydra, *CASES[case]):
        assert anatomy(made) == anatomy(composed)
        assert made._metadata.resolver_cache == composed._metadata.resolver_cache


def test_points_that_differ_in_plain_values_are_composed_once(hydra: Hydra, counted: list[tuple[str, ...]]) -> None:
    master = hydra.compose_config("config", FIXED, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
    for seed in range(5):
        point = hydra.config_loader.load_sweep_config(master, [*FIXED, f"train.seed={seed}"])
        assert (point.train.seed, point.hydra.overrides.task[-1]) == (seed, f"train.seed={seed}")
    assert len(counted) == 1


def test_points_share_nothing(hydra: Hydra) -> None:
    (one, _), (two, _) = points(hydra, ["+experiment=odd", "optim.lr=1"], ["+experiment=odd", "optim.lr=2"])
    two.user.list.append(3)
    assert (one.user.list, one.user.lr, two.user.lr) == ([1, 2], 1, 2)


def test_a_value_of_the_wrong_type_is_told_in_hydras_words(hydra: Hydra) -> None:
    def told(*before: str) -> str:
        master = hydra.compose_config("config", FIXED, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
        for text in before:
            hydra.config_loader.load_sweep_config(master, [text])
        with pytest.raises(HydraException) as caught:
            hydra.config_loader.load_sweep_config(master, ["train.seed=many"])
        return f"{caught.value}: {caught.value.__cause__}"

    assert told() == told("train.seed=1")
    assert "train.seed" in told()
