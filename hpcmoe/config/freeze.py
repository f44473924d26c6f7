"""A run's configuration as a file of plain values: what every attempt reads. Not for composing: nothing is looked up here."""

from __future__ import annotations

import dataclasses
import re
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from hpcmoe.config.names import unknown_key
from hpcmoe.config.schema import OWN_SECTIONS, Config
from hpcmoe.errors import UserError
from hpcmoe.files import write_atomic


def to_plain(config: Config) -> dict[str, Any]:
    """The configuration as dicts, lists and scalars; enums by name. Of a command's run without what it does not read."""
    left_out = OWN_SECTIONS if config.runs_command else frozenset()
    return {name: _plain(value) for name, value in vars(config).items() if name not in left_out}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {name: _plain(inner) for name, inner in vars(value).items()}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def to_yaml(config: Config) -> str:
    return plain_to_yaml(to_plain(config))


def plain_to_yaml(plain: dict[str, Any]) -> str:
    """Section by section: the thousand points of a sweep differ in one or two, and the others are put into words once."""
    return "".join(_section(name, value) for name, value in plain.items())


_SECTIONS: dict[tuple[str, str], str] = {}
MOST_SECTIONS = 1000


def _section(name: str, value: Any) -> str:
    key = (name, repr(value))
    if key not in _SECTIONS:
        if len(_SECTIONS) >= MOST_SECTIONS:
            _SECTIONS.clear()
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        _SECTIONS[key] = str(yaml.dump({name: value}, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120))
    return _SECTIONS[key]


def freeze(config: Config, path: Path) -> None:
    """Write ``config`` to ``path``, whole or not at all."""
    write_atomic(path, to_yaml(config))


def load_frozen(path: Path) -> Config:
    """The configuration in ``path``. Keys that this version lacks, and values of a wrong type, are UserErrors."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} is not a frozen config: a mapping was expected")
    try:
        merged: Any = OmegaConf.merge(OmegaConf.structured(Config), _literal(loaded))
        left_out = OWN_SECTIONS if merged.engine.name == "command" else frozenset()
        names = [field.name for field in dataclasses.fields(Config) if field.name not in left_out]
        values: dict[str, Any] = {name: merged[name] for name in names}
        plain: dict[str, Any] = {
            name: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for name, value in values.items()
        }
        config = Config(**plain)
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise UserError(f"{path} is from another version of hpcmoe: {unknown_key(str(error.full_key))}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {error.full_key}: {str(error).splitlines()[0]}") from error
    return config


def _literal(value: Any) -> Any:
    """Guard ``${`` in frozen text: everything was resolved before freezing, so what still looks like a reference is text."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    return value
