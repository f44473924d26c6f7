"""Whether a place is fit for run directories: tried out, and left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcmoe.runs import rootcheck
from hpcmoe.runs.rootcheck import check_root, file_system


def test_a_good_place_is_called_good_and_left_empty(tmp_path: Path) -> None:
    found = check_root(tmp_path, with_slurm=False)
    assert {one.level for one in found} <= {"ok", "warn"}, found
    assert any("exclusive links, locks, renames and appending work" in one.says for one in found)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_not_there_yet_is_judged_by_the_folder_above(tmp_path: Path) -> None:
    found = check_root(tmp_path / "a" / "runs", with_slurm=False)
    assert f"not there yet; {tmp_path} was looked at" in found[0].says
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_of_one_host_is_doubted_where_there_is_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, doubted in (("ext4", True), ("lustre", False), ("gpfs", False), ("nfs4", False)):
        monkeypatch.setattr(rootcheck, "file_system", lambda place, kind=kind: kind)
        assert any("every node must see the runs" in one.says for one in check_root(tmp_path, with_slurm=True)) == doubted


def test_a_file_system_without_exclusive_links_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(rootcheck.os, "link", refuse)
    [bad] = [one for one in check_root(tmp_path, with_slurm=False) if one.level == "bad"]
    assert "exclusive link does not work: [Errno 95] Operation not supported; two jobs could train one run" in bad.says


def test_a_place_where_nothing_can_be_made_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(rootcheck.tempfile, "mkdtemp", refuse)
    assert check_root(tmp_path, with_slurm=False)[-1].level == "bad"


def test_the_file_system_s_type_is_that_of_the_nearest_mount() -> None:
    assert file_system(Path("/proc/self")) == "proc"
