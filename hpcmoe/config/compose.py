"""Composing a run's configuration with Hydra: schema + conf/ + the user's --config-dir + overrides. Writes nothing anywhere.

Not for judging values (hpcmoe.config.validate) nor for wording Hydra's exceptions (hpcmoe.config.explain).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcmoe.config.elastic import read_nodes
from hpcmoe.config.explain import as_user_error
from hpcmoe.config.names import schema_keys, unknown_key
from hpcmoe.config.schema import OWN_SECTIONS, Config, WrittenConfig
from hpcmoe.errors import UserError
from hpcmoe.resources import make_plugins_importable, resource_dir

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

SCHEMA = "hpcmoe_schema"
ROOT = "config"


@contextmanager
def opened_hydra(config_dir: str | None = None, config_path: str | None = None) -> Iterator[Hydra]:
    """Hydra itself, with our configs on its search path. Its exceptions leave this block as UserErrors of one line.

    ``config_dir`` adds the user's configs; ``config_path`` stands in for conf/ (Hydra's own words for both).
    Hydra's application machinery is used, not its ``main``: no output directory, no logging set-up, no change of directory.
    """
    make_plugins_importable()
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    from hpcmoe.config.source import use_libyaml
    from hpcmoe.config.sweep_loader import SweepLoader

    version.setbase("1.3")
    ConfigStore.instance().store(name=SCHEMA, node=WrittenConfig, provider="hpcmoe")
    search_path = create_config_search_path(f"file://{_directory(config_path) if config_path else resource_dir('conf')}")
    use_libyaml()
    if config_dir:
        search_path.prepend("command-line", f"file://{_directory(config_dir)}", SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    try:
        with as_user_error():
            hydra = Hydra.create_main_hydra2("hpcmoe", search_path)
            hydra.config_loader = SweepLoader(search_path)
            yield hydra
    finally:
        GlobalHydra.instance().clear()


def _directory(path: str) -> Path:
    directory = Path(path).expanduser().absolute()
    if not directory.is_dir():
        raise UserError(f"config directory {str(directory)!r} does not exist")
    return directory


def compose(
    overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str = ROOT, config_path: str | None = None
) -> DictConfig:
    """The composed configuration of one run, with Hydra's own ``hydra`` node in it. Raises UserError."""
    from hydra.types import RunMode

    with opened_hydra(config_dir, config_path) as hydra:
        return hydra.compose_config(config_name, list(overrides), run_mode=RunMode.RUN, with_log_configuration=False)


def to_config(composed: DictConfig) -> Config:
    """The dataclass object behind a composed configuration; interpolations are resolved. Raises UserError."""
    from omegaconf import OmegaConf

    if OmegaConf.get_type(composed) is not WrittenConfig:
        raise UserError(f"the config does not start from the schema: add '{SCHEMA}' to its defaults, or use {ROOT}")
    added, missing = _survey(composed)
    not_wanted = OWN_SECTIONS if composed.engine.name == "command" else frozenset()
    missing = [key for key in missing if key.partition(".")[0] not in not_wanted]
    if added:
        raise UserError(unknown_key(added[0]))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{missing[0]} is not given{more}; set {missing[0]}=VALUE, or choose a group option that does")
    with as_user_error():
        values = {field.name: composed[field.name] for field in dataclasses.fields(Config) if field.name not in not_wanted}
        plain: dict[str, Any] = {
            name: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for name, value in values.items()
        }
    nodes, min_nodes = read_nodes(plain["nodes"])
    return Config(**plain | {"nodes": nodes, "min_nodes": min_nodes or plain["min_nodes"]})


def _survey(node: DictConfig, owner: str = "") -> tuple[list[str], list[str]]:
    """Keys below ``node`` that the schema lacks (Hydra's ``+key=`` adds them without asking it), and keys that have no value."""
    from omegaconf import DictConfig

    known = schema_keys()
    added: list[str] = []
    missing: list[str] = []
    for name in map(str, node):
        key = f"{owner}.{name}" if owner else name
        inner = node._get_node(name)
        if key == "hydra":
            continue
        if key not in known:
            added.append(key)
        elif inner is None or inner._is_missing():
            missing.append(key)
        elif not known[key] and isinstance(inner, DictConfig) and not (inner._is_none() or inner._is_interpolation()):
            added_inside, missing_inside = _survey(inner, key)
            added += added_inside
            missing += missing_inside
    return added, missing


def load(overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str = ROOT) -> Config:
    """Compose and convert in one step, unchecked: what tests, the planner and scripts want. Raises UserError."""
    return to_config(compose(overrides, config_dir, config_name))
