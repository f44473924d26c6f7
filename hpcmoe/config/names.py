"""Names of the schema's keys, and the right one for a wrong one. Walks dataclasses; needs neither Hydra nor OmegaConf at work."""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any

from hpcmoe.config.schema import Config
from hpcmoe.errors import nearest


@cache
def schema_keys(root: type = Config) -> dict[str, bool]:
    """Every dotted key of the schema, in its order; True for a mapping whose keys the user chooses (``env``, ``user``)."""
    keys: dict[str, bool] = {}
    hints = typing.get_type_hints(root)
    for field in dataclasses.fields(root):
        inner = _without_none(hints[field.name])
        keys[field.name] = typing.get_origin(inner) is dict
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            keys.update({f"{field.name}.{key}": open_ for key, open_ in schema_keys(inner).items()})
    return keys


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(choice for choice in typing.get_args(hint) if choice is not type(None))
    return hint


def right_key(key: str) -> str | None:
    """The schema key a user most likely meant: the same word in another group, then a near word beside it, then anywhere."""
    keys = schema_keys()
    leaf, parent = key.rpartition(".")[2], key.rpartition(".")[0]
    same_word = [valid for valid in keys if valid.rpartition(".")[2] == leaf and valid != key]
    if same_word:
        return min(same_word, key=lambda valid: (valid.count("."), list(keys).index(valid)))
    beside = nearest(key, [valid for valid in keys if valid.rpartition(".")[0] == parent])
    if beside and (parent or nearest(leaf, [beside])):
        return beside
    whole = nearest(key, keys)
    if whole:
        return whole
    near_leaf = nearest(leaf, {valid.rpartition(".")[2] for valid in keys})
    return next((valid for valid in keys if valid.rpartition(".")[2] == near_leaf), None)


def unknown_key(key: str) -> str:
    """One line for a key that the schema does not have."""
    keys = schema_keys()
    owner = key
    while (owner := owner.rpartition(".")[0]) and owner not in keys:
        pass
    if owner and keys[owner]:
        return f"no config key {key!r} yet; to add it: +{key}=VALUE"
    hint = right_key(key)
    if hint and not owner:
        return f"no config key {key!r}; did you mean {hint!r}?"
    near = f"did you mean {hint!r}? " if hint else ""
    depth = owner.count(".") + 1 if owner else 0
    inside = [valid.rpartition(".")[2] for valid in keys if valid.count(".") == depth and valid.rpartition(".")[0] == owner]
    if owner:
        return f"no config key {key!r}; {near}valid in {owner}: {', '.join(inside)}"
    return f"no config key {key!r}; valid at the top: {', '.join(inside)}; notes of your own go to +user.NAME=VALUE"
