"""#SBATCH lines: how a value is written so that sbatch reads that very value, and how such a line is read back. Pure.

sbatch splits these lines by itself, not with a shell: ``$`` and backticks mean nothing, and a backslash escapes the next
character even inside single quotes (Slurm 22.05, src/sbatch/opt.c, _get_argument).
"""

from __future__ import annotations

import re

from hpcmoe.errors import UserError

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_carries(what: str, value: str) -> None:
    """Raise UserError for a value that no #SBATCH line can carry."""
    if _CONTROL.search(value):
        raise UserError(f"{what}={value!r} holds a newline or another control character; Slurm cannot carry it")


def directive(flag: str, value: str | int | None = None) -> str:
    """One line, e.g. ``#SBATCH --comment='two words'``. ``flag`` without dashes in front; value None: a switch.

    Raises UserError where sbatch could not read the value back.
    """
    if value is None:
        return f"#SBATCH --{flag}"
    check_carries(f"--{flag}", str(value))
    return f"#SBATCH --{flag}={quote(str(value))}"


def quote(value: str) -> str:
    """``value`` as one word of an #SBATCH line."""
    if re.fullmatch(r"[\w@%+=:,./~^\[\]{}()-]+", value, re.ASCII):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def split(words: str) -> list[str]:
    """The inverse, for a whole line: sbatch's own way to split one. Raises ValueError for an open quote."""
    found: list[str] = []
    word, inside, quoting, escaped = "", False, "", False
    for char in words:
        if escaped:
            word, escaped = word + char, False
        elif char == "\\":
            inside = escaped = True
        elif quoting:
            word, quoting = (word, "") if char == quoting else (word + char, quoting)
        elif char in "'\"":
            inside, quoting = True, char
        elif char == "#":
            break
        elif not char.isspace():
            word, inside = word + char, True
        elif inside:
            found.append(word)
            word, inside = "", False
    if quoting:
        raise ValueError(f"a quote is open in {words!r}")
    return [*found, word] if inside else found


def verbatim(flags: str) -> str:
    """A user's own sbatch flags, as they wrote them."""
    check_carries("slurm.extra", flags)
    if not flags.startswith("-"):
        raise UserError(f"slurm.extra: {flags!r} is no sbatch flag; it must start with '-', e.g. --switches=1")
    return f"#SBATCH {flags}"


def filename_pattern(path: str) -> str:
    """``path`` for an option that fills in %j and the like: each % of its own is doubled. Raises UserError for a backslash."""
    if "\\" in path:
        raise UserError(f"{path!r} holds a backslash, with which Slurm stops filling in log file names; use another directory")
    return path.replace("%", "%%")


def read_directives(script: str) -> dict[str, str]:
    """Flag -> value of the ``--flag=value`` lines at the head of a job script, as sbatch reads them; a later line wins."""
    found: dict[str, str] = {}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break  # sbatch stops at the first command, too
        if line.startswith("#SBATCH "):
            for word in split(line.removeprefix("#SBATCH ")):
                flag, equals, value = word.partition("=")
                if flag.startswith("--") and equals:
                    found[flag.removeprefix("--")] = value
    return found
