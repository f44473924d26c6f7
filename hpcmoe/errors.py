"""Errors that a user can mend. Everything else is a bug and keeps its traceback.

The command line prints a ``UserError`` as one line and exits with 2; nothing has been written by then.
"""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """One clear line: what is wrong, where, what would be right."""


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to ``word``, or None when nothing is near enough to be helpful."""
    import difflib  # here, since only mistakes need it and every command would pay for it

    matches = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown_name(kind: str, word: str, valid: Iterable[str]) -> str:
    """One line for a name that does not exist: the nearest valid one first, then the choices."""
    choices = sorted(valid)
    hint = nearest(word, choices)
    near = f"did you mean {hint!r}? " if hint else ""
    return f"no {kind} {word!r}; {near}valid: {', '.join(choices) or 'none'}"
