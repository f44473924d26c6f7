"""Checking ``engine=command``: what the command is, how its progress is seen, what it cannot be combined with. Pure."""

from __future__ import annotations

import re
from pathlib import Path

from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError, unknown_name

GROUPS = ("step", "loss", "tokens_per_s")  # that engine.progress may name
EXAMPLE = "engine.command=[bash,train.sh]"


def check_command(config: Config) -> None:
    """Fills in engine.chdir and makes every word of a list text. Raises UserError."""
    engine = config.engine
    engine.command = _words(engine.command)
    engine.chdir = str(Path(engine.chdir or ".").expanduser().absolute())
    if engine.progress is not None:
        _check_progress(engine.progress)
    if engine.checkpoint_glob is not None and not engine.checkpoint_glob.strip():
        raise UserError("engine.checkpoint_glob is empty: write a pattern such as outputs/checkpoint/step-*/.metadata")
    if config.elastic:
        raise UserError(
            f"nodes={config.min_nodes}..{config.nodes}: an elastic run is laid out anew by hpcmoe's own engine; "
            f"with engine=command set nodes=N"
        )
    if config.resilience.preflight and config.tasks_per_node != config.gpus_per_node:
        raise UserError(
            f"resilience.preflight=true tests each GPU in a task of its own, and engine.tasks_per_node={config.tasks_per_node}; "
            f"it needs engine.tasks_per_node={config.gpus_per_node}"
        )


def no_command(config: Config) -> None:
    """What is set for a command must not be passed over where none runs. Raises UserError."""
    for name, value in vars(config.engine).items():
        if config.engine.name == "hpcmoe" and name != "name" and value != getattr(type(config.engine)(), name):
            raise UserError(f"engine.{name}={value} is for engine=command; this run has engine={config.engine.name}")


def _words(command: object) -> str | list[str]:
    if isinstance(command, str) and command.strip():
        return command
    if isinstance(command, list) and command and all(isinstance(word, (str, int, float)) for word in command):
        words = [str(word).lower() if isinstance(word, bool) else str(word) for word in command]
        if words[0].strip() and not any("\0" in word for word in words):
            return words
    if command in (None, "", []):
        raise UserError(f"engine=command needs the command: {EXAMPLE}, or one text for bash -c")
    raise UserError(f"engine.command={command!r} must be a list of words, such as {EXAMPLE}, or one text for bash -c")


def _check_progress(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise UserError(f"engine.progress={pattern!r} is no regular expression: {error}") from error
    for name in groups:
        if name not in GROUPS:
            raise UserError(unknown_name("group in engine.progress", name, GROUPS))
    if "step" not in groups:
        raise UserError(f"engine.progress={pattern!r} must have a group named step, such as 'step:\\s*(?P<step>\\d+)'")
