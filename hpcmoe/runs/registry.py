"""Finding runs: the root of all run directories, ids, ``latest`` and prefixes. Not for what is inside one."""

from __future__ import annotations

import os
import string
from pathlib import Path

from hpcmoe.errors import UserError, nearest
from hpcmoe.runs.journal import first_json_line
from hpcmoe.runs.rundir import RunDir

RUNS_ENV = "HPCMOE_RUNS"
ID_LENGTH = 6
_LETTERS = string.ascii_lowercase
_ALPHABET = _LETTERS + string.digits


def runs_root() -> Path:
    """``$HPCMOE_RUNS`` or ./runs, absolute; it need not exist yet."""
    return Path(os.environ.get(RUNS_ENV) or "runs").expanduser().absolute()


def new_run_id(root: Path) -> str:
    """A short id that is not taken: a letter first, so that it is never mistaken for a Slurm job id."""
    import secrets  # here, as it brings half of a short command's imports

    while True:
        run_id = secrets.choice(_LETTERS) + "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH - 1))
        if run_id not in ("latest", "sweeps") and not (root / run_id).exists():
            return run_id


def created_at(run: RunDir) -> float:
    """Epoch seconds of the run's first journal event; of its directory when the journal is empty."""
    first = first_json_line(run.journal) or {}
    return float(first["t"]) if "t" in first else run.path.stat().st_mtime


def run_dirs(root: Path) -> list[RunDir]:
    """Every run below ``root``, in no order."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [RunDir(root / name) for name in names if not name.startswith(".") and os.path.isfile(f"{root}/{name}/events.jsonl")]


def list_runs(root: Path) -> list[RunDir]:
    """Every run below ``root``, oldest first."""
    return sorted(run_dirs(root), key=lambda run: (created_at(run), run.run_id))


def find_run(word: str, root: Path | None = None) -> RunDir:
    """The run that ``word`` names: ``latest``, an id, a unique prefix of one, or a run directory's path.

    Raises UserError when there is none, or more than one.
    """
    if os.sep in word and (Path(word) / "events.jsonl").is_file():
        return RunDir(Path(word).absolute())
    root = root or runs_root()
    exact = RunDir(root / word)
    if os.sep not in word and not word.startswith(".") and word != "latest" and exact.journal.is_file():
        return exact
    runs = list_runs(root)
    if not runs:
        raise UserError(f"no runs in {root}; `hpcmoe submit` starts one, ${RUNS_ENV} names another place")
    if word == "latest":
        return runs[-1]
    matches = [run for run in runs if run.run_id.startswith(word)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{word!r} is short for several runs: {', '.join(run.run_id for run in matches)}; give more letters")
    hint = nearest(word, [run.run_id for run in runs])
    near = f"did you mean {hint!r}? " if hint else ""
    raise UserError(f"no run {word!r} in {root}; {near}the newest is {runs[-1].run_id!r}; `hpcmoe status` lists them")
