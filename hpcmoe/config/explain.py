"""Hydra's, OmegaConf's and YAML's exceptions as one clear line each: what is wrong, where, what would be right.

Works on the exceptions' types and attributes where they have them, on their first line where they have not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from hpcmoe.config.names import schema_keys, unknown_key
from hpcmoe.errors import UserError, nearest, unknown_name

_KINDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


@contextmanager
def as_user_error() -> Iterator[None]:
    """Turn a configuration error raised inside the block into a UserError. HYDRA_FULL_ERROR=1 lets it through as it is."""
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        raise UserError(explain(error)) from error
    except ValueError as error:
        if "Config group override must be a string" not in str(error):
            raise
        raise UserError("a group's option is a name: write group=option, or group.key=value for one of its keys") from error
    except (AssertionError, AttributeError) as error:
        # OmegaConf's answers to an override below a null group, or of one (model.mla.kv_lora_rank=512, model.mla={...}).
        key = re.search(r"full_key: (\S+)", str(error))
        if "Unexpected type for root: NoneType" not in str(error) and not (key and "'NoneType' object" in str(error)):
            raise
        group = key[1] if key else "a group such as model.mla"
        cure = "choose an option that has it, or write it in a file of --config-dir"
        raise UserError(f"{group} is null here, and overrides cannot fill it: {cure}") from error


def explain(error: BaseException) -> str:
    """One line for ``error``; the deepest exception that names a key decides."""
    import yaml
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, yaml.YAMLError):
        return _yaml_line(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read override {error.override!r}: {_first_line(error)}"
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    where = re.match(r"In '([^']+)': \w+ raised while composing config", str(error))
    prefix = f"in config {where[1]!r}: " if where else ""
    override = re.match(r"Error merging override (.*)", str(error))
    for inner in _chain(error):
        if isinstance(inner, yaml.YAMLError):
            return _yaml_line(inner)
        if isinstance(inner, OmegaConfBaseException):
            return prefix + _omegaconf_line(inner, override[1] if override else None)
    return prefix + _composition_line(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _yaml_line(error: BaseException) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"not valid YAML: {_first_line(error)}"
    problem = getattr(error, "problem", None) or getattr(error, "context", None) or "cannot be read"
    return f"{mark.name}, line {mark.line + 1}: not valid YAML: {problem}"


def _missing_config(error: BaseException) -> str:
    wanted = str(getattr(error, "missing_cfg_file", None) or "")
    options = getattr(error, "options", None)
    group, _, name = wanted.rpartition("/")
    if group and options is not None:
        return unknown_name(group, name, options)
    if group:
        return f"no config group {group!r}: cannot take {name!r} from it"
    return f"no config {wanted!r} found in conf/ or --config-dir"


def _omegaconf_line(error: BaseException, override: str | None) -> str:
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, ValidationError

    key = str(getattr(error, "full_key", None) or "")
    text = _first_line(error)
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)) and key and "not in" in text:
        return _no_match(key)
    if isinstance(error, ValidationError):
        return _validation_line(key, text, override)
    if isinstance(error, InterpolationResolutionError):
        return f"{key}: {text[0].lower()}{text[1:]}" if key else text
    at = override or key
    return f"{at}: {text}" if at and key not in text else text


def _validation_line(key: str, text: str, override: str | None) -> str:
    at = override if override and not override.startswith(("~", "+")) else key or override or "config"
    converted = re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text)
    if converted:
        named = at if "=" in at else f"{at}={converted[1]}"
        return f"{named}: not {_KINDS.get(converted[2], converted[2])}"
    if "is not a valid bool" in text:
        return f"{at}: not {_KINDS['Boolean']}"
    if "is not a ListConfig" in text:
        return f"{at}: a list is wanted, such as {key or at.partition('=')[0]}=[...]"
    choices = re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", text)
    if choices:
        valid = choices[2].split(", ")
        hint = nearest(choices[1], valid)
        near = f"did you mean {hint!r}? " if hint else ""
        return f"{key or at}: no such value {choices[1]!r}; {near}valid: {', '.join(valid)}"
    if "not Optional" in text or "'None'" in text or "non-optional" in text.lower():
        return f"{key or at}: null is not a value here; a value must be given"
    return f"{at}: {text}"


def _composition_line(error: BaseException) -> str:
    """Hydra's own complaints. Its advice about ``+`` is right for our open mappings only, so the schema is asked first."""
    text = _first_line(error)
    could_not = re.match(r"Could not override '([^']+)'", text)
    if could_not:
        return _no_match(could_not[1])
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'", text)
    if ambiguous:
        key, _, values = ambiguous[1].partition("=")
        return f"{ambiguous[1]}: several values; -m sweeps over them, {key}=[{values}] is a list, {key}=\\'{values}\\' is text"
    item = re.match(r"Could not append to config. An item is already at '([^']+)'", text)
    if item:
        return f"{item[1]} exists already: write it without the +"
    already = re.match(r"(\S+) appears more than once in the final defaults list", text)
    if already:
        return f"{already[1]} is chosen already: write it without the +"
    return text


def _no_match(name: str) -> str:
    if "/" in name:
        return f"no config group {name!r} is in use; to add one: +{name}=OPTION"
    if name == "experiment":
        return "experiments are added: write +experiment=NAME"
    if name in schema_keys():
        return f"{name} cannot be set like this"
    return unknown_key(name)
