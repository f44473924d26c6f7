"""A sweep's directory: its points on record, and how a person names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcmoe.errors import UserError
from hpcmoe.runs.duplicates import finished_runs
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import finish
from hpcmoe.runs.sweep import SweepDir, SweepPoint, create_sweep, find_sweep, list_sweeps


def sweep(root: Path, name: str = "abc123", **more: object) -> SweepDir:
    return create_sweep(root / "sweeps" / name, launcher="hpcmoe", overrides=["x=1,2"], root=root, **more)  # type: ignore[arg-type]


def test_points_come_back_as_they_were_written_whatever_a_killed_writer_left(tmp_path: Path) -> None:
    one = sweep(tmp_path)
    points = [SweepPoint(n, (f"x={n}", "y='a b'"), f"k{n}", f"run{n}", None, 1.5, "s") for n in range(3)]
    one.append_points(points[:2])
    one.append_points(points[2:])
    with one.points_file.open("a") as file:
        file.write('{"index": 3, "overr')
    assert one.read_points() == points
    assert [run.run_id for run in one.runs()] == ["run0", "run1", "run2"]


def test_points_whose_jobs_were_refused_are_taken_back(tmp_path: Path) -> None:
    one = sweep(tmp_path)
    one.append_points(SweepPoint(n, (), f"k{n}", f"run{n}") for n in range(3))
    one.withdraw([1, 2], "invalid partition")
    one.append_points([SweepPoint(3, (), "k3", None, same_as="run9")])
    assert [point.result_run for point in one.read_points()] == ["run0", "run9"]


def test_a_sweep_is_found_by_its_id_its_beginning_its_path_or_as_the_latest(tmp_path: Path) -> None:
    first, second = sweep(tmp_path), sweep(tmp_path, "xyz789")
    assert list_sweeps(tmp_path) == [first, second]
    assert find_sweep("abc123", tmp_path) == find_sweep("ab", tmp_path) == find_sweep(str(first.path), tmp_path) == first
    assert find_sweep("latest", tmp_path) == second
    with pytest.raises(UserError, match=r"no sweep 'abc124'.*did you mean 'abc123'"):
        find_sweep("abc124", tmp_path)
    with pytest.raises(UserError, match="no sweeps in"):
        find_sweep("latest", tmp_path / "elsewhere")


def test_a_sweep_in_a_directory_of_the_user_s_own_has_an_id_too(tmp_path: Path) -> None:
    sweep(tmp_path, "mine")
    own = create_sweep(tmp_path / "work" / "mine", launcher="hpcmoe", root=tmp_path)
    assert own.sweep_id == "mine-2"
    assert find_sweep("mine-2", tmp_path).path == own.path
    assert create_sweep(own.path, launcher="other", root=tmp_path).facts["launcher"] == "hpcmoe"


def test_only_a_run_that_has_completed_has_the_result_of_its_key(tmp_path: Path) -> None:
    for name, key, state in [("a", "k1", "COMPLETED"), ("b", "k2", "FAILED"), ("c", "k3", None), ("d", "k1", "COMPLETED")]:
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        Journal(run.journal).append("planned", run_id=name, key=key)
        if state:
            finish(run, state, None)
    assert finished_runs(tmp_path, {"k1", "k2", "k3"}) == {"k1": "d"}
