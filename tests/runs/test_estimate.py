"""What a submission will use, and the question before a costly one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.cli.main import main
from hpcmoe.config.compose import load
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.runs.estimate import confirm, estimate_gpu_hours
from tests.hpcmoe_slurm.fakes import FakeSlurm


@pytest.mark.parametrize(
    ("overrides", "speed", "hours"),
    [
        # 60 steps x 65536 tokens at 100 tokens/s a GPU
        (["train.steps=60", "train.global_batch_tokens=65536"], 100.0, 60 * 65536 / 100 / 3600),
        (["slurm.time=2:00:00"], None, 16.0),  # 2 nodes of four GPUs
        (["slurm.time=2:00:00", "resilience.max_gpu_hours=3"], None, 3.0),
        (["slurm.time=null"], None, None),
    ],
)
def test_an_estimate_is_the_planners_else_the_time_limits(overrides: list[str], speed: float | None, hours: float | None) -> None:
    config = validate(load(["cluster=testbed", "nodes=2", *overrides]))
    assert estimate_gpu_hours(config, speed) == (hours if hours is None else pytest.approx(hours))


def test_without_gpus_nothing_is_used() -> None:
    assert estimate_gpu_hours(validate(load(["cluster=local"])), 100.0) == 0.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "goes_on"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_one_question_and_only_a_yes_submits(answer: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", screen)
    if goes_on:
        confirm([700.0, None, 600.0], 1000.0, yes=False)
    else:
        with pytest.raises(UserError, match="nothing is submitted"):
            confirm([700.0, None, 600.0], 1000.0, yes=False)
    assert screen.getvalue() == "this will use about 1,300 GPU-hours in 3 runs. Submit? [y/N] "


@pytest.mark.parametrize(
    "arguments", [([900.0], 1000.0, False), ([9e9], None, False), ([9e9], 1000.0, True), ([None], 1.0, False)]
)
def test_cheap_allowed_and_unknown_submissions_are_not_asked_about(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # nobody reads an answer
    confirm(*arguments)


@pytest.mark.parametrize("words", [[], ["-m", "train.seed=0,1"]])
def test_with_nobody_to_ask_a_costly_run_or_sweep_is_refused_and_nothing_is_written(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    common = ["cluster=testbed", "nodes=2", "slurm.time=2:00:00", "resilience.ask_above_gpu_hours=10"]
    assert main(["submit", *common, *words]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"about {32 if words else 16} GPU-hours" in said
    assert "--yes submits it" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [[], ["-m", "train.seed=0,1"]])
def test_yes_submits_without_a_question(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm(tmp_path / "bin", monkeypatch)
    slurm.answers("sbatch", "41\n")
    slurm.answers("srun")
    slurm.answers("scontrol", "MaxArraySize            = 1001\n")
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("sys.stdin", None)
    common = ["cluster=testbed", "nodes=2", "slurm.time=2:00:00", "resilience.ask_above_gpu_hours=10"]
    assert main(["submit", *common, *words, "--yes"]) == 0, capsys.readouterr().err
    assert len(slurm.calls("sbatch")) == 1


def test_a_sweep_of_which_no_point_fits_under_its_ceiling_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path / "runs"))
    assert main(["submit", "cluster=testbed", "resilience.max_gpu_hours=0.01", "-m", "train.seed=0,1"]) == 2
    assert "resilience.max_gpu_hours=0.01 leaves no room" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
