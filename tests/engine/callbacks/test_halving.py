"""A run at a rung of its sweep pauses or goes on; one that paused continues there, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.schema import CheckpointConfig, Config, EvaluationConfig, HalvingConfig, SweepConfig, TrainConfig
from hpcmoe.engine.manifest import published
from hpcmoe.runs.halving import Reached
from hpcmoe.runs.journal import Journal, iter_json_lines
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.rungs import read_rungs, write_rung
from tests.engine.ranks import Attempt, events, make_run, small_config, write_text

pytestmark = pytest.mark.multiprocess
STEPS, WORLD, FIRST = 12, 2, 3  # rungs at steps 3 and 9


def config(text: Path, metric: str, **changes: Any) -> Config:
    return small_config(
        text,
        WORLD,
        WORLD,
        STEPS,
        train=TrainConfig(steps=STEPS, seq_len=32, global_batch_tokens=32 * 8, seed=3),
        checkpoint=CheckpointConfig(interval=0),
        sweep=SweepConfig(halving=HalvingConfig(first_rung=FIRST, eta=3, metric=metric, **changes)),
        evaluation=EvaluationConfig(interval=FIRST if metric == "eval_loss" else 0, batches=1),
    )


def in_sweep(run: RunDir, sweep_dir: Path) -> RunDir:
    sweep_dir.mkdir(exist_ok=True)
    Journal(run.journal).append("planned", run_id=run.run_id, sweep=str(sweep_dir))
    return run


def attempt(run: RunDir, name: str) -> dict[str, Any] | None:
    """Its verdict."""
    ranks = Attempt(run, name, WORLD)
    assert ranks.finish() == [0] * WORLD, ranks.log()
    return ranks.verdict()


def losses(run: RunDir) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in iter_json_lines(run.metrics)]


def others(sweep_dir: Path, rung: int, step: int, *figures: float) -> None:
    for number, value in enumerate(figures):
        write_rung(sweep_dir, Reached(f"other{number}", rung, step, value), "1.0")


def test_a_run_pauses_at_a_rung_is_asked_again_and_ends_as_one_that_nobody_paused(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    untouched = make_run(tmp_path / "untouched", config(text, "loss"))
    assert attempt(untouched, "job.0") == {"verdict": "completed", "step": STEPS, "source": None, "reason": None}
    assert len(losses(untouched)) == STEPS, "a run in no sweep goes on"

    sweep_dir = tmp_path / "sweep"
    run = in_sweep(make_run(tmp_path / "run", config(text, "loss")), sweep_dir)
    others(sweep_dir, 1, FIRST, 0.1, 0.2)
    why = f"paused at rung 1 (step {FIRST}): 3rd of 3, only the best goes on"
    paused = {"verdict": "stopped", "step": FIRST, "source": "rung", "reason": why}
    assert attempt(run, "job.0") == paused
    assert published(run.checkpoints) == [FIRST]
    (own,) = [one for one in read_rungs(sweep_dir) if one.run_id == "run"]
    assert (own.rung, own.step, own.value) == (1, FIRST, losses(run)[-1][1])

    assert attempt(run, "job.1") == paused, "its pause was not journalled: it may have been killed before"
    assert len(losses(run)) == FIRST

    Journal(run.journal).append("rested", state="STOPPED", reason=why, rung=1)
    Journal(run.journal).append("submitted", job_id="job", how="promotion")
    others(sweep_dir, 2, 9, 100.0, 200.0)
    assert attempt(run, "job.2") == {"verdict": "completed", "step": STEPS, "source": None, "reason": None}
    assert losses(run) == losses(untouched)
    assert [(event["rung"], event["goes_on"], event["place"], event["of"]) for event in events(run, "rung")] == [
        (1, False, 3, 3),
        (1, False, 3, 3),
        (2, True, 1, 3),
    ]
    assert 9 in published(run.checkpoints), "it is saved at a rung also where it goes on"


def test_the_loss_of_an_evaluation_decides_where_that_is_asked_for(tmp_path: Path) -> None:
    sweep_dir = tmp_path / "sweep"
    run = in_sweep(make_run(tmp_path / "run", config(write_text(tmp_path / "text"), "eval_loss", mode="max")), sweep_dir)
    others(sweep_dir, 1, FIRST, 0.1, 0.2)
    others(sweep_dir, 2, 9, 100.0, 200.0)
    verdict = attempt(run, "job.0")
    assert verdict is not None
    assert (verdict["verdict"], verdict["source"], verdict["step"]) == ("stopped", "rung", 9)
    evaluated = {line["eval_step"]: line["eval_loss"] for line in iter_json_lines(run.metrics) if line["eval_step"]}
    told = {one.step: one.value for one in read_rungs(sweep_dir) if one.run_id == "run"}
    assert told == {step: evaluated[step] for step in (FIRST, 9)}
