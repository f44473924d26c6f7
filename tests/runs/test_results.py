"""Every point of a sweep appears once, with what its run's own files say of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hpcmoe
from hpcmoe.errors import UserError
from hpcmoe.runs.results import Results, look, read_results
from hpcmoe.runs.sweep import SweepPoint
from tests.runs.sweeps import planned, small_sweep, started, steps, write_run, write_sweep


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return read_results(small_sweep(tmp_path))


def column(results: Results, name: str) -> list[object]:
    return [row[name] for row in results.rows()]


def test_every_point_is_there_once_with_its_state_and_overrides(results: Results) -> None:
    assert column(results, "point") == [0, 1, 2, 3, 4]
    assert column(results, "optim.lr") == [1e-4, 3e-4, 1e-4, 3e-4, 1e-3]
    assert column(results, "state") == ["COMPLETED", "FAILED", "HELD_BACK", "COMPLETED", "UNKNOWN"]
    assert column(results, "run_id") == ["aaaaaa", "bbbbbb", "cccccc", "dddddd", "eeeeee"]
    assert column(results, "same_as") == [None, None, None, "dddddd", None]


def test_figures_are_the_newest_and_the_best_over_all_steps(results: Results) -> None:
    assert column(results, "loss") == [4.0, None, None, 2.5, None], "the failed run's newest loss is not finite"
    assert column(results, "best_loss") == [3.0, 6.0, None, 2.5, None]
    assert column(results, "tokens_per_s") == [200.0, 150.0, None, 100.0, None]
    assert column(results, "gpu_hours") == [2.0, 2.0, 0.0, 2.0, None]


def test_a_failure_shows_its_reason_and_the_words_of_the_rank_that_failed_first(results: Results) -> None:
    assert column(results, "reason")[1] == "3 attempts without progress"
    assert column(results, "last_error")[1] == "rank0: RuntimeError: lr is too high"
    assert column(results, "reason")[4] == "the directory of run eeeeee is gone"


def test_only_overrides_that_differ_are_worth_a_column_of_a_table(results: Results) -> None:
    assert results.varying() == ["optim.lr", "train.seed"]
    assert column(results, "model") == ["tiny"] * 5


def test_an_override_that_is_called_like_a_column_has_a_name_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path, "aaaaaa", planned(), metrics=steps([1.0], "7"))
    results = read_results(write_sweep(tmp_path, [SweepPoint(0, ("+loss=mse", "state=x"), "k", "aaaaaa")]))
    (row,) = results.rows()
    assert (row["override.loss"], row["loss"], row["override.state"], row["state"]) == ("mse", 1.0, "x", "HELD_BACK")


def test_a_command_s_figures_are_those_that_its_log_told(tmp_path: Path) -> None:
    lines = [{"t": 1.0, "attempt": "7.0", "step": step, "accuracy": value} for step, value in enumerate([0.1, 0.5, 0.4])]
    write_run(tmp_path, "aaaaaa", planned(engine="command", steps=None), started("7"), metrics=lines)
    sweep = write_sweep(tmp_path, [SweepPoint(0, (), "k", "aaaaaa")])
    (row,) = read_results(sweep).rows()
    assert row["accuracy"] == 0.4
    assert "loss" not in row
    assert read_results(sweep, best="accuracy", highest=True).rows()[0]["best_accuracy"] == 0.5
    assert read_results(sweep, best="accuracy").rows()[0]["best_accuracy"] == 0.1


def test_a_figure_that_no_run_has_is_answered_with_the_nearest(tmp_path: Path) -> None:
    sweep = small_sweep(tmp_path)
    with pytest.raises(UserError, match="no figure 'los'; did you mean 'loss'"):
        read_results(sweep, best="los")
    with pytest.raises(UserError, match="no point of sweep swp002 has a value of it yet"):
        read_results(write_sweep(tmp_path, [SweepPoint(0, (), "k", "cccccc")], "swp002"), best="loss")


def test_points_are_filtered_and_sorted_by_any_column(results: Results) -> None:
    def left(*filters: str, **order: object) -> list[int]:
        return [each.index for each in results.select(filters, **order).points]  # type: ignore[arg-type]

    assert left("state=FAILED,unknown") == [1, 4]
    assert left("optim.lr=0.0001") == [0, 2]
    assert left("optim.lr>1e-4", "train.seed!=0") == [3, 4]
    assert left("best_loss=null") == [2, 4]
    assert left(sort="best_loss") == [3, 0, 1, 2, 4], "points without a value are last"
    assert left(sort="best_loss", descending=True) == [1, 0, 3, 2, 4]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("optim.l=1", "no column 'optim.l'; did you mean 'optim.lr'"),
        ("state", "is no filter"),
        ("loss<low", "'low' is no number"),
    ],
)
def test_a_filter_that_means_nothing_is_refused(text: str, answer: str, results: Results) -> None:
    with pytest.raises(UserError, match=answer):
        results.select([text])


def test_a_look_reads_no_metrics_but_their_ends(tmp_path: Path) -> None:
    sweep = small_sweep(tmp_path)
    with (tmp_path / "aaaaaa" / "metrics.jsonl").open("r+b") as file:
        file.truncate(1 << 42)
        file.seek(0, 2)
        file.write(b'\n{"step": 3, "loss": 1.25}\n')
    seen = look(sweep).points
    assert (seen[0].figures, seen[1].last_error) == ({"loss": 1.25}, "rank0: RuntimeError: lr is too high")


def test_python_gets_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: Results) -> None:
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path))
    loaded = hpcmoe.load_sweep("swp")
    assert loaded.rows() == results.rows()
    frame = loaded.frame()
    assert list(frame.columns) == loaded.columns()
    assert json.loads(frame.to_json(orient="records")) == json.loads(json.dumps(loaded.rows()))


def test_without_pandas_rows_still_work_and_frame_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: Results
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert len(results.rows()) == 5
    with pytest.raises(UserError, match=r"frame\(\) needs pandas"):
        results.frame()


def test_importing_the_package_stays_light() -> None:
    code = "import sys, hpcmoe; hpcmoe.load_sweep; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert loaded & {"torch", "hydra", "omegaconf", "pandas", "pyarrow", "numpy", "json", "subprocess"} == set()
