"""A user cancels and resumes a whole sweep. Nothing runs, and Slurm is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcmoe.errors import UserError
from hpcmoe.locks import file_lock
from hpcmoe.runs import sweep_control
from hpcmoe.runs.advance import Advanced
from hpcmoe.runs.journal import read_journal
from hpcmoe.runs.life import fold
from hpcmoe.runs.results import look
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.sweep import SweepDir, SweepPoint
from hpcmoe.runs.sweep_life import life_of, stop_reason
from tests.runs.sweeps import finished, planned, write_run, write_sweep


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The looks that are taken at sweeps, with nothing done."""
    seen: list[str] = []

    def once(sweep: SweepDir, wait_s: float = 0.0) -> Advanced:
        with file_lock(sweep.lock) as mine:
            assert mine
        seen.append(sweep.sweep_id)
        return Advanced()

    monkeypatch.setattr(sweep_control, "advance_once", once)
    monkeypatch.setattr(sweep_control, "advance", lambda sweep, wait_s=0.0: once(sweep).said)
    return seen


def make(root: Path, *ends: dict[str, Any] | None) -> SweepDir:
    """A sweep of runs with these ends, which were all submitted; of None's nobody knows more than that they were made."""
    points = []
    for index, end in enumerate(ends):
        write_run(root, f"run{index}", planned(), *([] if end is None else [end]))
        points.append(SweepPoint(index, (f"x={index}",), f"k{index}", f"run{index}"))
    sweep = write_sweep(root, points)
    taken = [index for index, end in enumerate(ends) if end is not None]
    sweep.journal("array_submitted", token="t", job_id="7", points=taken)
    return sweep


def waiting(sweep: SweepDir) -> list[int]:
    return [point.index for point in life_of(sweep).waiting(sweep.read_points())]


def test_a_resume_that_is_interrupted_forgets_no_run(tmp_path: Path, looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make(tmp_path, finished("FAILED"), finished("CANCELLED"), finished("FAILED"))
    ready = sweep_control.make_ready

    def interrupted(run: RunDir) -> None:
        if run.run_id == "run1":
            raise KeyboardInterrupt
        ready(run)

    with monkeypatch.context() as patch:
        patch.setattr(sweep_control, "make_ready", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep_control.resume_points(sweep, look(sweep).points)
    assert 0 in waiting(sweep), "the one that is ready is submitted by whoever looks at the sweep next"
    sweep.journal("submitted_elsewhere", points=[1, 2])  # as that one does with those that are not
    assert sweep_control.resume_points(sweep, look(sweep).points).again == ["run1", "run2"]
    assert waiting(sweep) == [0, 1, 2]


def test_a_resume_finds_what_an_interrupted_one_left_behind(tmp_path: Path, looks: list[str]) -> None:
    sweep = make(tmp_path, finished("COMPLETED"), {"event": "reopened"}, None)
    assert sweep_control.resume_points(sweep, look(sweep).points).again == ["run1"]
    assert waiting(sweep) == [1, 2]


def test_a_run_that_cannot_be_resumed_does_not_wait(tmp_path: Path, looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make(tmp_path, finished("FAILED"))

    def refused(_: RunDir) -> None:
        raise UserError("another process")

    monkeypatch.setattr(sweep_control, "make_ready", refused)
    assert sweep_control.resume_points(sweep, look(sweep).points).refused == {"run0": "another process"}
    assert waiting(sweep) == []


def test_a_resume_lifts_the_stop_of_a_sweep_whose_runs_are_all_done(tmp_path: Path, looks: list[str]) -> None:
    sweep = make(tmp_path, finished("COMPLETED"))
    with pytest.raises(UserError, match="nothing to resume"):
        sweep_control.resume_points(sweep, look(sweep).points)
    sweep.journal("cancelled")
    assert sweep_control.resume_points(sweep, look(sweep).points).lines() == ["sweep swp001 takes points again"]
    assert stop_reason(life_of(sweep)) is None


def test_what_a_filtered_cancel_makes_room_for_is_looked_for(tmp_path: Path, looks: list[str]) -> None:
    sweep = make(tmp_path, None, None)
    sweep_control.cancel_points(sweep, look(sweep).points[:1], whole=False)
    assert looks == ["swp001"]
    sweep_control.cancel_points(sweep, look(sweep).points, whole=True)
    assert looks == ["swp001"], "nothing more is started"


def test_a_cancelled_sweep_ends_points_too_that_were_added_meanwhile(tmp_path: Path, looks: list[str]) -> None:
    sweep = make(tmp_path, None, None)
    assert len(sweep_control.cancel_points(sweep, look(sweep).points[:1], whole=True)) == 1
    ends = [fold(read_journal(run.journal)).ended or {} for run in sweep.runs()]
    assert [end.get("state") for end in ends] == ["CANCELLED", "CANCELLED"]
