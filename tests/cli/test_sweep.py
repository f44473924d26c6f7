"""What `hpcmoe sweep` says and writes of sweeps that are given. Nothing runs, and nobody is asked."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.cli import main as front
from hpcmoe.errors import UserError
from hpcmoe.runs.sweep import SweepDir, SweepPoint
from tests.runs.sweeps import finished, planned, small_sweep, steps, write_run, write_sweep

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path))
    small_sweep(tmp_path)
    return tmp_path


def said(capsys: Captured, *words: str, code: int = 0) -> str:
    assert front.main(["sweep", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def document(capsys: Captured, *words: str) -> Any:
    return json.loads(said(capsys, *words, "--json"))


def test_status_counts_the_states_and_shows_every_failure_with_its_last_words(root: Path, capsys: Captured) -> None:
    lines = said(capsys, "status", "latest").splitlines()
    assert lines[1] == "2 COMPLETED, 1 HELD_BACK, 1 UNKNOWN, 1 FAILED; 4.00 GPU-hours; at most 2 at once"
    assert [line.split()[:4] for line in lines[3:6]] == [
        ["POINT", "optim.lr", "train.seed", "STATE"],
        ["0", "1e-4", "0", "COMPLETED"],
        ["1", "3e-4", "0", "FAILED"],
    ]
    assert "=dddddd" in lines[7].split(), "a duplicate names the run that has its result"
    assert lines[-2:] == [
        "point 1 (optim.lr=3e-4 train.seed=0 model=tiny), run bbbbbb, FAILED: 3 attempts without progress",
        "  rank0: RuntimeError: lr is too high",
    ]


def test_status_tells_the_throttle_that_was_set_last(root: Path, capsys: Captured) -> None:
    sweep = SweepDir(root / "sweeps" / "swp001")
    assert document(capsys, "status", "latest")["throttle"] == 2
    sweep.journal("throttle", to=5)
    assert "; at most 5 at once" in said(capsys, "status", "latest")
    sweep.journal("throttle", to=None)
    assert "at once" not in said(capsys, "status", "latest")


def test_what_waits_says_for_what(root: Path, capsys: Captured) -> None:
    SweepDir(root / "sweeps" / "swp001").journal("held_back", points=[2], reason="the user may have 3 jobs at once")
    (point,) = [point for point in document(capsys, "status", "latest")["points"] if point["state"] == "HELD_BACK"]
    assert (point["point"], point["reason"]) == (2, "the user may have 3 jobs at once")


def test_without_a_sweep_status_lists_all(root: Path, capsys: Captured) -> None:
    write_sweep(root, [SweepPoint(0, (), "k", "cccccc")], "two222")
    lines = said(capsys, "status").splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["swp001", "5"], ["two222", "1"]]
    assert [one["sweep_id"] for one in document(capsys, "status")["sweeps"]] == ["swp001", "two222"]


def test_a_long_table_keeps_what_needs_a_person_and_says_how_many_more(root: Path, capsys: Captured) -> None:
    points = []
    for number in range(60):
        write_run(root, f"r{number:05d}", planned(), finished("FAILED" if number == 57 else "COMPLETED", "bad"))
        points.append(SweepPoint(number, (f"train.seed={number}",), "k", f"r{number:05d}"))
    write_sweep(root, points, "long00")
    text = said(capsys, "status", "long00")
    assert "... and 20 more points; --all shows them" in text.splitlines()
    assert "\n57     57          FAILED" in text
    assert len(said(capsys, "status", "long00", "--all").splitlines()) > 60


def test_scripts_get_every_point_of_status_and_results(root: Path, capsys: Captured) -> None:
    for verb in ("status", "results"):
        told = document(capsys, verb, "swp001")
        assert told["sweep_id"] == "swp001"
        assert [point["overrides"][0] for point in told["points"]] == [
            f"optim.lr={lr}" for lr in ("1e-4", "3e-4", "1e-4", "3e-4", "1e-3")
        ]
        assert [point["state"] for point in told["points"]] == ["COMPLETED", "FAILED", "HELD_BACK", "COMPLETED", "UNKNOWN"]
        assert [point["run_id"] for point in told["points"]] == ["aaaaaa", "bbbbbb", "cccccc", "dddddd", "eeeeee"]
    assert told["points"][0]["figures"] == {"loss": 4.0, "best_loss": 3.0}
    assert told["points"][0]["settings"] == {"optim.lr": 1e-4, "train.seed": 0, "model": "tiny"}


def test_the_best_points_come_first(root: Path, capsys: Captured) -> None:
    rows = said(capsys, "results", "latest", "--best", "loss", "--top", "2").splitlines()
    assert rows[0].split() == [
        "POINT",
        "optim.lr",
        "train.seed",
        "STATE",
        "STEP",
        "loss",
        "best_loss",
        "TOKENS/S",
        "GPU-HOURS",
        "RUN",
    ]
    assert [row.split()[0] for row in rows[1:]] == ["3", "0"]
    speeds = document(capsys, "results", "latest", "--best", "tokens_per_s")["points"]
    assert [point["point"] for point in speeds][:2] == [0, 1], "more of it is better"


def test_filters_leave_what_was_asked_for(root: Path, capsys: Captured) -> None:
    left = document(
        capsys, "results", "latest", "--filter", "optim.lr=0.0001", "--filter", "state!=HELD_BACK", "--sort", "run_id"
    )
    assert [point["point"] for point in left["points"]] == [0]
    assert said(capsys, "results", "latest", "--filter", "state=QUEUED") == "no point is left by the filters\n"


def test_csv_and_parquet_hold_the_same_rows_as_python(root: Path, capsys: Captured) -> None:
    import pyarrow.parquet

    import hpcmoe

    rows = hpcmoe.load_sweep("swp001").rows()
    table, stored = root / "table.csv", root / "table.parquet"
    assert said(capsys, "results", "latest", "--output", str(table)) == f"5 points in {table}\n"
    with table.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert read == [{name: "" if cell is None else str(cell) for name, cell in row.items()} for row in rows]
    said(capsys, "results", "latest", "-o", str(stored))
    found = pyarrow.parquet.read_table(stored)
    assert found.to_pylist() == rows
    kinds = {field.name: str(field.type) for field in found.schema}
    assert (kinds["optim.lr"], kinds["train.seed"], kinds["model"], kinds["loss"]) == ("double", "int64", "string", "double")
    assert sorted(path.name for path in root.iterdir() if "table" in path.name) == ["table.csv", "table.parquet"]


def test_values_that_are_numbers_here_and_words_there_are_words_in_parquet(root: Path, capsys: Captured) -> None:
    import pyarrow.parquet

    points = [SweepPoint(number, (f"x={value}",), "k", "aaaaaa") for number, value in enumerate(("1", "auto", "null"))]
    write_sweep(root, points, "mixed0")
    said(capsys, "results", "mixed0", "--format", "parquet", "--output", str(root / "mixed"))
    assert pyarrow.parquet.read_table(root / "mixed").column("x").to_pylist() == ["1", "auto", None]


def test_without_pyarrow_parquet_is_refused_in_one_line(root: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    target = root / "table.parquet"
    assert said(capsys, "results", "latest", "-o", str(target), code=2) == (
        "hpcmoe: --format parquet needs pyarrow: pip install 'hpcmoe[tables]'; csv and json need nothing\n"
    )
    assert not target.exists()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["status", "swq001"], "no sweep 'swq001' in {root}/sweeps; did you mean 'swp001'? the newest is 'swp001'"),
        (["results", "latest", "--format", "parquet"], "--format parquet is for a file: --output FILE"),
        (["results", "latest", "--sort", "los"], "--sort: no column 'los'; did you mean 'loss'?"),
        (["results", "latest", "--best", "loss", "--sort", "loss"], "--best and --sort do not go together"),
        (["results", "latest", "--top", "0"], "--top 0: at least 1"),
        (["results", "latest", "-o", "{root}/swp/none/x.csv/"], "--output {root}/swp"),
        (["throttle", "latest", "0"], "'0' is no number of runs: 1 or more, or 'none' for no bound"),
        (["statsu", "latest"], "sweep: argument VERB: invalid choice: 'statsu'"),
        ([], "sweep: the following arguments are required: VERB"),
    ],
)
def test_mistakes_are_one_line(words: list[str], answer: str, root: Path, capsys: Captured) -> None:
    (root / "swp").write_text("no directory")
    line = said(capsys, *(word.format(root=root) for word in words), code=2)
    assert line.startswith("hpcmoe: " + answer.format(root=root))
    assert line.count("\n") == 1


def test_held_back_runs_are_cancelled_without_a_job_and_can_be_found_again(root: Path, capsys: Captured) -> None:
    assert said(capsys, "cancel", "latest").splitlines() == [
        "sweep swp001: 1 run cancelled, 3 were over already",
        "`hpcmoe sweep resume swp001` would continue them",
    ]
    assert document(capsys, "status", "latest")["states"] == {"COMPLETED": 2, "CANCELLED": 1, "UNKNOWN": 1, "FAILED": 1}
    assert "starts no more runs: the sweep is cancelled" in said(capsys, "status", "latest").splitlines()
    assert "there is nothing to cancel" in said(capsys, "cancel", "latest", code=2)


def test_numbers_too_small_for_four_digits_are_shown(root: Path, capsys: Captured) -> None:
    write_run(root, "ffffff", planned(), metrics=steps([0.00001234], "7"))
    write_sweep(root, [SweepPoint(0, (), "k", "ffffff")], "tiny00")
    assert "1.234e-05" in said(capsys, "results", "tiny00")


def test_a_resume_leaves_what_early_stopping_has_paused_unless_it_is_asked_for(
    root: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcmoe.runs import sweep_control

    rested = {"event": "rested", "state": "STOPPED", "reason": "paused at rung 1", "rung": 1}
    write_run(root, "gggggg", planned(), {"event": "submitted", "job_id": "7"}, rested)
    write_run(root, "hhhhhh", planned(), {"event": "submitted", "job_id": "8"}, {**rested, "reason": "asked", "rung": None})
    write_sweep(root, [SweepPoint(0, (), "k", "gggggg"), SweepPoint(1, (), "l", "hhhhhh")], "halved")
    asked: list[list[int]] = []

    def resume(sweep: object, points: Any) -> Any:
        asked.append([each.index for each in points])
        raise UserError("that is all")

    monkeypatch.setattr(sweep_control, "resume_points", resume)
    said(capsys, "resume", "halved", code=2)
    said(capsys, "resume", "halved", "--filter", "point=0", code=2)
    assert asked == [[1], [0]]
