"""A sweep's directory: its points, what was typed, and what has been done for it. Disk only; nothing is decided here.

A point's run is an ordinary run below the runs root; where it stands is its own journal's to say. What is submitted next is
hpcmoe.runs.advance's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcmoe.errors import UserError, nearest
from hpcmoe.files import read_json, write_json
from hpcmoe.runs.journal import Event, Journal, append_lines, iter_json_lines, read_journal
from hpcmoe.runs.registry import RUNS_ENV, runs_root
from hpcmoe.runs.rundir import RunDir


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep, as a line of points.jsonl."""

    index: int
    overrides: tuple[str, ...]
    key: str  # hpcmoe.config.key: equal for points with the same result
    run_id: str | None = None  # its run; None: there is none, as ``same_as`` has its result
    same_as: str | None = None  # a run with the same key that had COMPLETED when the point was made
    gpu_hours: float | None = None  # an estimate; None: not known
    shape: str = ""  # equal for points that may be elements of one array

    @property
    def result_run(self) -> str:
        """The id of the run that has, or will have, the point's result."""
        found = self.run_id or self.same_as
        assert found is not None, self
        return found


@dataclass(frozen=True)
class SweepDir:
    """One sweep's directory. Every path below it is named here and nowhere else."""

    path: Path

    @property
    def facts_file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def points_file(self) -> Path:
        return self.path / "points.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def sbatch(self) -> Path:
        """The arrays' scripts, their lists of runs, and their logs."""
        return self.path / "sbatch"

    @property
    def shared(self) -> Path:
        """Provenance that all its runs have in common."""
        return self.path / "shared"

    @property
    def lock(self) -> Path:
        """Held by the one that decides what is submitted next."""
        return self.path / ".advance.lock"

    @property
    def asked(self) -> Path:
        """Grows by a byte with each one that wants it looked at."""
        return self.path / ".advance.asked"

    @cached_property
    def facts(self) -> dict[str, Any]:
        """sweep.json. Raises UserError where it cannot be read."""
        found = read_json(self.facts_file)
        if not isinstance(found, dict):
            raise UserError(f"{self.path} is no sweep: it has no sweep.json")
        return found

    @property
    def sweep_id(self) -> str:
        return str(self.facts["sweep_id"])

    @property
    def root(self) -> Path:
        """Where its runs are."""
        return Path(self.facts["runs_root"])

    @property
    def policy(self) -> dict[str, Any]:
        """``sweep.*`` of the configuration that it was submitted with, and the first ``throttle`` (None: none)."""
        return dict(self.facts.get("policy") or {})

    def run(self, run_id: str) -> RunDir:
        return RunDir(self.root / run_id)

    def runs(self) -> list[RunDir]:
        """The runs that were made for its points, in the points' order; not those of duplicates."""
        return [self.run(point.run_id) for point in self.read_points() if point.run_id is not None]

    def read_points(self) -> list[SweepPoint]:
        """All points by their index; without those that were taken back, as Slurm refused their jobs."""
        points: dict[int, SweepPoint] = {}
        for line in iter_json_lines(self.points_file):
            if "withdrawn" in line:
                for index in line["withdrawn"]:
                    points.pop(int(index), None)
            elif "index" in line:
                points[int(line["index"])] = _point(line)
        return [points[index] for index in sorted(points)]

    def read_events(self) -> list[Event]:
        return read_journal(self.events_file)

    def append_points(self, points: Iterable[SweepPoint]) -> None:
        """Add points: with one write, so that a reader meets whole lines."""
        _append_lines(self.points_file, [{**asdict(point), "overrides": list(point.overrides)} for point in points])

    def withdraw(self, indices: Sequence[int], reason: str) -> None:
        """Take points back whose jobs Slurm refused; their runs are gone."""
        _append_lines(self.points_file, [{"withdrawn": list(indices), "reason": reason}])

    def journal(self, event: str, **fields: Any) -> Event:
        return Journal(self.events_file).append(event, **fields)


def _point(line: Mapping[str, Any]) -> SweepPoint:
    known = {name: line[name] for name in SweepPoint.__dataclass_fields__ if name in line}
    return SweepPoint(**{**known, "overrides": tuple(known.get("overrides") or ()), "key": str(known.get("key") or "")})


def _append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    append_lines(path, "".join(json.dumps(line, default=str) + "\n" for line in lines))


def create_sweep(
    path: Path,
    *,
    launcher: str,
    overrides: Sequence[str] = (),
    policy: Mapping[str, Any] | None = None,
    root: Path | None = None,
    **more: Any,
) -> SweepDir:
    """A new sweep in ``path``; of one that is there already, that one. ``overrides``: what was typed; ``more``: further facts.

    A sweep outside of the runs root is found by its id too, where a link can be made.
    """
    sweep = SweepDir(path.absolute())
    if sweep.facts_file.exists():
        return sweep
    root = root or runs_root()
    sweep.sbatch.mkdir(parents=True, exist_ok=True)
    facts = {
        "sweep_id": path.name,
        "created": time.time(),
        "launcher": launcher,
        "overrides": list(overrides),
        "cwd": os.getcwd(),
        "runs_root": str(root),
        "policy": dict(policy or {}),
        **more,
    }
    home = root / "sweeps"
    if path.absolute().parent != home.absolute():
        facts["sweep_id"] = _link(home, sweep.path)
    write_json(sweep.facts_file, facts)
    return sweep


def _link(home: Path, path: Path) -> str:
    """An id under which a sweep in a directory of the user's own is found; its name, if that is free."""
    name, number = path.name, 1
    try:
        home.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                (home / name).symlink_to(path, target_is_directory=True)
                return name
            except FileExistsError:
                if (home / name).resolve() == path.resolve():
                    return name
                number += 1
                name = f"{path.name}-{number}"
    except OSError:
        return name  # no links here: it is found by its path


def list_sweeps(root: Path | None = None) -> list[SweepDir]:
    """Every sweep of the runs root, oldest first."""
    home = (root or runs_root()) / "sweeps"
    if not home.is_dir():
        return []
    found = [
        SweepDir(path.resolve()) for path in home.iterdir() if not path.name.startswith(".") and (path / "sweep.json").is_file()
    ]
    return sorted(found, key=lambda sweep: (float(sweep.facts.get("created") or 0.0), sweep.sweep_id))


def find_sweep(word: str, root: Path | None = None) -> SweepDir:
    """The sweep that ``word`` names: ``latest``, an id, the beginning of one, or a sweep directory's path.

    Raises UserError when there is none, or more than one.
    """
    if os.sep in word:
        if (Path(word) / "sweep.json").is_file():
            return SweepDir(Path(word).absolute())
        raise UserError(f"{word} is no sweep: it has no sweep.json")
    root = root or runs_root()
    sweeps = list_sweeps(root)
    if not sweeps:
        raise UserError(f"no sweeps in {root / 'sweeps'}; `hpcmoe submit -m` starts one, ${RUNS_ENV} names another place")
    if word == "latest":
        return sweeps[-1]
    by_id = {sweep.sweep_id: sweep for sweep in sweeps}
    if word in by_id:
        return by_id[word]
    matches = [name for name in by_id if name.startswith(word)]
    if len(matches) == 1:
        return by_id[matches[0]]
    if matches:
        raise UserError(f"{word!r} is short for several sweeps: {', '.join(matches)}; give more letters")
    hint = nearest(word, list(by_id))
    near = f"did you mean {hint!r}? " if hint else ""
    raise UserError(f"no sweep {word!r} in {root / 'sweeps'}; {near}the newest is {sweeps[-1].sweep_id!r}")
