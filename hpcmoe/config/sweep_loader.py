"""Hydra's config loader for the many points of a sweep: those that differ only in plain values are composed once.

The first point of a kind is composed by Hydra. The next ones are copies of it with their own values, set by Hydra's own function.
Whatever is more than one scalar for a key that holds one (groups, packages, +, ++, ~, lists, mappings, hydra.*) is part of the
kind; where anything is unusual Hydra composes the point itself. tests/config/test_sweep_loader.py holds both against each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, ValueNode, open_dict

_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class _Kind:
    """A composed point, and the keys in which others of its kind may differ."""

    composed: bytes
    keys: frozenset[str]


class SweepLoader(ConfigLoaderImpl):
    """Takes the place of Hydra's own loader in an app that is Hydra's in all else."""

    def __init__(self, config_search_path: Any) -> None:
        super().__init__(config_search_path)
        self._master: DictConfig | None = None
        self._kinds: dict[tuple[str, ...], _Kind | None] = {}  # None: for these Hydra composes each point
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        if master_config is not self._master:
            self._master = master_config
            self._kinds.clear()
            self._groups.clear()
        overrides = self._parse(sweep_overrides)
        if overrides is None:
            return super().load_sweep_config(master_config, sweep_overrides)
        plain = [override for override in overrides if self._is_plain(override, master_config)]
        keys = {override.key_or_group for override in plain}
        # A plain key stands in for its value; all else counts as it is written.
        name = tuple(o.key_or_group if o.key_or_group in keys and o in plain else str(o.input_line) for o in overrides)
        if name not in self._kinds:
            composed = super().load_sweep_config(master_config, sweep_overrides)
            self._kinds[name] = _kind(composed, overrides, plain)
            return composed
        kind = self._kinds[name]
        made = None if kind is None else self._from_kind(kind, master_config, overrides, plain)
        return super().load_sweep_config(master_config, sweep_overrides) if made is None else made

    def _from_kind(
        self, kind: _Kind, master: DictConfig, overrides: Sequence[Override], plain: Sequence[Override]
    ) -> DictConfig | None:
        """None: Hydra shall do it, and say what is wrong."""
        composed: DictConfig = pickle.loads(kind.composed)
        try:
            self._apply_overrides_to_config(list(plain), composed)
        except HydraException:
            return None
        app = [override for override in overrides if not override.is_hydra_override()]
        composed.hydra.overrides.task = [override.input_line for override in app]
        how = composed.hydra.job.config.override_dirname
        with open_dict(composed.hydra):
            composed.hydra.job.override_dirname = get_overrides_dirname(
                overrides=app, kv_sep=how.kv_sep, item_sep=how.item_sep, exclude_keys=how.exclude_keys
            )
        OmegaConf.copy_cache(from_config=master, to_config=composed)
        return composed

    def _parse(self, texts: Sequence[str]) -> list[Override] | None:
        parser = OverridesParser.create()
        try:
            for text in texts:
                if text not in self._parsed:
                    self._parsed[text] = parser.parse_override(text)
        except HydraException:
            return None
        return [self._parsed[text] for text in texts]

    def _is_plain(self, override: Override, master: DictConfig) -> bool:
        return (
            override.type is OverrideType.CHANGE
            and override.package is None
            and override.value_type in (None, ValueType.ELEMENT)
            and isinstance(override.value(), _SCALARS)
            and not override.is_hydra_override()
            and not self._is_group(override.key_or_group, master)
        )

    def _is_group(self, key: str, master: DictConfig) -> bool:
        if key not in self._groups:
            hydra = [str(text) for text in master.hydra.overrides.hydra]
            # with the places that hydra.searchpath adds
            _, repository = self._parse_overrides_and_create_caching_repo(master.hydra.job.config_name, hydra)
            self._groups[key] = repository.group_exists(key)
        return self._groups[key]


def _kind(composed: DictConfig, overrides: Sequence[Override], plain: Sequence[Override]) -> _Kind | None:
    """None where a plain key does not hold one value of its own, or another override may reach it."""
    keys = [override.key_or_group for override in plain]
    others = [override.key_or_group for override in overrides if override not in plain]
    if len(set(keys)) < len(keys) or any(_touch(key, other) for key in keys for other in [*others, *keys] if other != key):
        return None
    if any(key in others for key in keys) or not all(_holds_a_value(composed, key) for key in keys):
        return None
    try:
        return _Kind(pickle.dumps(composed), frozenset(keys))
    except (pickle.PicklingError, TypeError, AttributeError):  # an app's own classes and values
        return None


def _touch(key: str, other: str) -> bool:
    """Is one of them inside the other?"""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _holds_a_value(composed: DictConfig, key: str) -> bool:
    """Whether the key's own node, and not one that an interpolation leads to, holds a scalar."""
    node: Any = composed
    for name in key.split("."):
        if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
            return False
        node = node._get_node(name)
    return isinstance(node, ValueNode)
