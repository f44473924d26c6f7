"""What the runs of a sweep tell each other at its rungs: nothing is told twice, and no line that is lost loses a run."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcmoe.runs.halving import Reached
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.rungs import NAME, passed_rungs, paused_at, read_rungs, sweep_dir_of, told_by, with_told, write_rung


def one(run: int, rung: int = 1, value: float | None = 1.0) -> Reached:
    return Reached(f"run{run}", rung, 100 * rung, value)


def test_a_rung_that_is_reported_again_is_written_once(tmp_path: Path) -> None:
    assert write_rung(tmp_path, one(1, value=2.5), "7.0") == [one(1, value=2.5)]
    assert write_rung(tmp_path, one(1, value=3.5), "7.1") == [one(1, value=2.5)], "the first figure counts"
    write_rung(tmp_path, one(1, rung=2), "7.1")
    assert read_rungs(tmp_path) == [one(1, value=2.5), one(1, rung=2)]


def test_runs_that_report_at_once_are_all_heard(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda run: write_rung(tmp_path, one(run), f"{run}.0"), range(40)))
    assert sorted(read_rungs(tmp_path), key=lambda reached: reached.run_id) == sorted(
        (one(run) for run in range(40)), key=lambda reached: reached.run_id
    )


def test_lines_that_are_torn_or_foreign_are_passed_over_and_the_next_starts_anew(tmp_path: Path) -> None:
    write_rung(tmp_path, one(1), "7.0")
    with (tmp_path / NAME).open("a") as file:
        file.write('{"run_id": "run2", "rung": "x"}\n[1]\n{"run_id": "run3", "value": "much", "rung": 1}\n{"run_id": "run4", "ru')
    write_rung(tmp_path, one(5, value=None), "8.0")
    assert read_rungs(tmp_path) == [one(1), one(5, value=None)]
    assert read_rungs(tmp_path / "nowhere") == []


def test_a_figure_that_is_not_finite_is_none(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"run_id": "run1", "rung": 1, "step": 100, "value": float("nan")}) + "\n")
    assert read_rungs(tmp_path) == [one(1, value=None)]


def test_what_only_a_runs_own_journal_knows_counts_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl", "7.0")
    journal.append("rung", rung=1, step=100, value=4.0, goes_on=True)
    journal.append("rung", rung=2, step=200, value=3.0, goes_on=False)
    told = told_by("run1", read_journal(journal.path))
    assert with_told([one(1), one(2)], told) == [one(1), one(2), one(1, rung=2, value=3.0)]
    assert paused_at(read_journal(journal.path), "7.0") == 2
    assert paused_at(read_journal(journal.path), "7.1") is None


def test_a_rung_is_passed_by_its_verdict_or_by_a_submission_after_the_pause(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.append("planned", sweep="/runs/sweeps/s1")
    journal.append("rung", rung=1, goes_on=True)
    journal.append("rung", rung=2, goes_on=False)
    assert passed_rungs(read_journal(journal.path)) == {1}, "killed before it could pause: it is asked again"
    journal.append("rested", state="STOPPED", rung=2)
    assert passed_rungs(read_journal(journal.path)) == {1}
    journal.append("submitted", job_id="9", how="promotion")
    assert passed_rungs(read_journal(journal.path)) == {1, 2}
    journal.append("rested", state="STOPPED", reason="asked to stop by control/stop")
    journal.append("submitted", job_id="10", how="resume")
    assert passed_rungs(read_journal(journal.path)) == {1, 2}
    assert sweep_dir_of(read_journal(journal.path)) == Path("/runs/sweeps/s1")
