"""How a run leaves and comes back: real ranks of the real engine, signals and kills; losses must stay the same to the bit."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.schema import CheckpointConfig, Config, OptimConfig, SkipConfig, TrainConfig
from hpcmoe.engine.manifest import checkpoint_name, published
from hpcmoe.runs.rundir import RunDir
from tests.engine.ranks import Attempt, events, make_run, small_config, write_text

pytestmark = pytest.mark.multiprocess
STEPS, WORLD = 40, 2


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("corpus") / "text")


def config(text: Path, **sections: Any) -> Config:
    return small_config(text, WORLD, WORLD, STEPS, **sections)


@pytest.fixture(scope="module")
def untouched(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that nobody disturbed."""
    run = make_run(tmp_path_factory.mktemp("untouched") / "run", config(text))
    attempt = Attempt(run, "job.0", WORLD)
    assert attempt.finish() == [0, 0], attempt.log()
    assert attempt.verdict() == {"verdict": "completed", "step": STEPS, "source": None, "reason": None}
    return run


def metrics(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()] if run.metrics.exists() else []


def losses(run: RunDir) -> dict[int, set[tuple[float, float]]]:
    """By step, every (loss, gradient norm) that any attempt saw."""
    seen: dict[int, set[tuple[float, float]]] = defaultdict(set)
    for line in metrics(run):
        seen[line["step"]].add((line["loss"], line["grad_norm"]))
    return dict(seen)


def reached(run: RunDir, step: int) -> bool:
    return f'"step": {step}, ' in (run.metrics.read_text() if run.metrics.exists() else "")


def finish(run: RunDir, name: str) -> Attempt:
    attempt = Attempt(run, name, WORLD)
    assert attempt.finish() == [0] * WORLD, attempt.log()
    return attempt


def test_an_untouched_run_learns_and_tells_each_step_once(untouched: RunDir) -> None:
    lines = metrics(untouched)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert lines[-1]["tokens"] == STEPS * 256
    assert published(untouched.checkpoints) == [40, 35]
    (first,) = events(untouched, "first_step")
    assert first["step"] == 1
    assert {"imports", "rendezvous", "build", "load", "first_step"} <= first["startup"].keys()


def test_one_signalled_rank_makes_all_leave_at_one_step_and_the_resumed_losses_are_the_same(
    text: Path, untouched: RunDir, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", config(text))
    attempt = Attempt(run, "job.0", WORLD)
    attempt.wait_for(lambda: reached(run, 2))
    attempt.signal(1, signal.SIGUSR2)
    assert attempt.finish() == [0, 0], attempt.log()
    verdict = attempt.verdict()
    assert verdict is not None
    assert (verdict["verdict"], verdict["source"]) == ("leave", "signal")
    assert 2 <= verdict["step"] < STEPS
    assert published(run.checkpoints)[0] == verdict["step"] == metrics(run)[-1]["step"]
    finish(run, "job.1")
    assert losses(run) == losses(untouched)
    assert len(metrics(run)) == STEPS, "no step was lost"
    assert [(event["step"], event["verdict"]) for event in events(run, "left")] == [
        (verdict["step"], "leave"),
        (STEPS, "completed"),
    ]
    assert events(run, "resumed")[0]["step"] == verdict["step"]
    assert events(run, "first_step")[1]["step"] == verdict["step"] + 1
    (certified,) = events(run, "certified")
    assert certified["reason"] == f"step {verdict['step'] + 1} had not been done after this checkpoint before"
    assert [(event["step"], event["count"]) for event in events(run, "next_samples")] == [(1, 8), (verdict["step"] + 1, 8)]


def test_after_a_kill_and_a_damaged_checkpoint_the_one_before_is_used(text: Path, untouched: RunDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config(text, checkpoint=CheckpointConfig(interval=4, keep_last=3)))
    attempt = Attempt(run, "job.0", WORLD)
    attempt.wait_for(lambda: len(published(run.checkpoints)) >= 2)
    attempt.signal(0, signal.SIGKILL)
    assert attempt.finish() == [-signal.SIGKILL, 1]
    assert attempt.verdict() is None
    assert "Traceback" in (run.attempt("job.0") / "error-rank0001.txt").read_text()
    newest, before = published(run.checkpoints)[:2]
    damaged = run.checkpoints / checkpoint_name(newest) / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    scrap = run.checkpoints / ".step-00000039.job.0.tmp"
    scrap.mkdir()

    finish(run, "job.1")
    (skipped,) = events(run, "checkpoint_skipped")
    assert skipped["checkpoint"] == checkpoint_name(newest)
    assert skipped["reason"] == "__1_0.distcp does not match its checksum"
    assert events(run, "resumed")[0]["step"] == before
    (certified,) = events(run, "certified")
    assert (certified["verdict"], certified["step"], certified["before"]["attempt"]) == ("identical", before + 1, "job.0")
    assert losses(run) == losses(untouched)
    assert not scrap.exists()
    assert published(run.checkpoints) == [40, 36, 32]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False).returncode:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=False)


def test_a_disk_that_is_full_for_a_while_costs_some_saves_and_nothing_else(
    text: Path, untouched: RunDir, small_disk: Path, tmp_path: Path
) -> None:
    """Metrics and logs lie on it, too; the journal does not, so that the test can see what happens."""
    run = make_run(small_disk / "run", config(text, checkpoint=CheckpointConfig(interval=2, keep_last=2)))
    run.journal.symlink_to(tmp_path / "events.jsonl")
    attempt = Attempt(run, "job.0", WORLD)
    attempt.wait_for(lambda: bool(published(run.checkpoints)))
    ballast = run.path / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    attempt.wait_for(lambda: bool(events(run, "save_failed")))
    assert published(run.checkpoints), "what was sound before"
    ballast.unlink()
    assert attempt.finish() == [0, 0], attempt.log()
    assert published(run.checkpoints) == [40, 38]
    assert "No space left on device" in events(run, "save_failed")[0]["reason"]
    assert len(metrics(run)) == STEPS, "no line was lost"
    assert losses(run) == losses(untouched)


def test_checkpoints_that_are_all_unusable_mean_a_fresh_start(text: Path, untouched: RunDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config(text))
    for step in published(untouched.checkpoints):
        shutil.copytree(untouched.checkpoints / checkpoint_name(step), run.checkpoints / checkpoint_name(step))
    (run.checkpoints / "step-00000040" / "manifest.json").unlink()
    (run.checkpoints / "step-00000035" / "__0_0.distcp").unlink()
    finish(run, "job.0")
    assert [event["reason"] for event in events(run, "checkpoint_skipped")] == [
        "manifest.json is missing or not JSON",
        "__0_0.distcp is missing",
    ]
    assert losses(run) == losses(untouched)


def test_control_files_save_and_stop(text: Path, untouched: RunDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config(text, checkpoint=CheckpointConfig(interval=0, keep_last=5)))
    save, stop = run.control / "save", run.control / "stop"
    save.touch()
    attempt = Attempt(run, "job.0", WORLD)
    attempt.wait_for(lambda: not save.exists())
    assert published(run.checkpoints), "removed once the checkpoint is there"
    stop.touch()
    assert attempt.finish() == [0, 0]
    verdict = attempt.verdict()
    assert verdict is not None
    assert (verdict["verdict"], verdict["source"]) == ("stopped", "control")
    assert stop.exists(), "only resume takes it away"

    again = Attempt(run, "job.1", WORLD)
    assert again.finish() == [0, 0]
    assert again.verdict() == verdict, "it is still asked to stop: nothing new"
    assert reached(run, verdict["step"])
    assert not reached(run, verdict["step"] + 1)

    stop.unlink()
    finish(run, "job.2")
    assert losses(run) == losses(untouched)


def test_a_notice_or_a_signal_before_the_first_step_leaves_at_once(text: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config(text))
    run.notice("job.0").parent.mkdir(parents=True)
    run.notice("job.0").touch()
    noticed = finish(run, "job.0")
    assert noticed.verdict() == {"verdict": "leave", "step": 0, "source": "signal", "reason": None}
    early = Attempt(run, "job.1", WORLD)
    early.wait_for(lambda: "listening" in run.rank_log("job.1", 1).read_text() if run.rank_log("job.1", 1).exists() else False)
    while early.verdict() is None and all(rank.is_alive() for rank in early.ranks):
        early.signal(1, signal.SIGTERM)  # from its first moments on, and again while it leaves
        time.sleep(0.005)
    assert early.finish() == [0, 0], early.log()
    assert not metrics(run)
    assert published(run.checkpoints) == []


def test_a_finished_run_started_again_completes_at_once(untouched: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(untouched.path, run.path)
    again = finish(run, "job.7")
    assert again.verdict() == {"verdict": "completed", "step": STEPS, "source": None, "reason": None}
    assert len(metrics(run)) == STEPS


def test_a_wrong_number_of_ranks_is_one_clear_error_before_training(text: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_config(text, 4, 4, STEPS))
    attempt = Attempt(run, "job.0", 1)
    assert attempt.finish() == [2]
    assert "1 ranks were started, but the run is laid out for 4" in attempt.log()
    verdict = attempt.verdict()
    assert verdict is not None
    assert verdict["verdict"] == "failed"
    assert "laid out for 4" in verdict["reason"]


def test_losses_that_stay_not_finite_fail_on_all_ranks_with_their_step(text: Path, tmp_path: Path) -> None:
    train = TrainConfig(steps=STEPS, seq_len=32, global_batch_tokens=256, seed=3, skip=SkipConfig(most_in_a_row=2))
    run = make_run(tmp_path / "run", config(text, optim=OptimConfig(lr=1e30, clip_norm=0.0), train=train))
    attempt = Attempt(run, "job.0", WORLD)
    assert attempt.finish() == [2, 2], attempt.log()
    verdict = attempt.verdict()
    assert verdict is not None
    assert verdict["verdict"] == "failed"
    assert verdict["reason"].startswith("step 4: loss ")
    assert "gradient norm nan: not finite; the last checkpoint is of step 0. Skipped before it: 2 steps" in verdict["reason"]
    assert [(event["step"], event["reason"]) for event in events(run, "step_skipped")] == [(2, "not finite"), (3, "not finite")]
    assert [(line["step"], line["skipped"], line["skipped_steps"]) for line in metrics(run)] == [
        (1, None, 0),
        (2, "not finite", 1),
        (3, "not finite", 2),
    ]


def test_another_corpus_at_resume_is_refused(untouched: RunDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config(write_text(tmp_path / "other", seed=1)))
    shutil.copytree(untouched.checkpoints, run.checkpoints)
    attempt = Attempt(run, "job.0", WORLD)
    assert attempt.finish() == [2, 2]
    verdict = attempt.verdict()
    assert verdict is not None
    assert "was trained on a corpus with fingerprint" in verdict["reason"]
