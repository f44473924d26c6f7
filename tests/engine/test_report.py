"""What is written about steps: JSON that any reader takes, one line a step, and a line that people can read."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpcmoe.engine.callbacks.callback import Evaluated
from hpcmoe.engine.outlet import Outlet
from hpcmoe.engine.peak import Peak
from hpcmoe.engine.report import Reporter, StepFigures

FIGURES = StepFigures(
    step=1,
    loss=2.5,
    tokens=256,
    batch_tokens=256,
    skipped=None,
    skipped_steps=0,
    grad_norm=0.25,
    lr=1e-3,
    tokens_per_s=1000.0,
    mfu=None,
    flops_convention="titan",
    peak_tflops=None,
    precision="fp32",
    aux_loss=1.0,
    z_loss=0.0,
    expert_max_over_mean=1.5,
    seconds=0.256,
    attempt="job.0",
    t=1.0,
)


@pytest.fixture
def reporter(tmp_path: Path) -> Reporter:
    return Reporter(tmp_path / "metrics.jsonl", None, 1, 100, 10, Peak(None, "fp32", "unknown"))


def lines(tmp_path: Path) -> list[dict]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_what_is_not_finite_is_null_and_said_at_once(reporter: Reporter, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bad = replace(FIGURES, step=3, loss=math.nan, grad_norm=math.inf, skipped="not finite", skipped_steps=2)
    reporter.tell(bad)
    reporter.write(bad)
    assert capsys.readouterr().out.endswith("left · SKIPPED: not finite (2 so far)\n"), "although only every tenth step is told"
    (line,) = lines(tmp_path)
    assert (line["loss"], line["grad_norm"], line["skipped"], line["skipped_steps"]) == (None, None, "not finite", 2)


def test_an_evaluation_is_told_at_once_and_written_with_the_next_step_once(
    reporter: Reporter, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    reporter.evaluation(Evaluated(step=1, loss=2.25, tokens=131072, seconds=65.0))
    assert capsys.readouterr().out == "evaluation after step 1 · loss 2.2500 · 131k tokens, held out · 1m05s\n"
    assert not lines(tmp_path)
    reporter.write(FIGURES)
    reporter.write(replace(FIGURES, step=2))
    assert [(line["step"], line["loss"], line["eval_step"], line["eval_loss"]) for line in lines(tmp_path)] == [
        (1, 2.5, 1, 2.25),
        (2, 2.5, None, None),
    ]


def test_lines_that_a_full_disk_refuses_are_written_whole_and_in_order_later(
    reporter: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write, room = os.write, [100, 0]

    def short(fd: int, data: bytes) -> int:
        size = room.pop(0) if room else 0
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:size])

    monkeypatch.setattr(os, "write", short)
    reporter.write(FIGURES)
    reporter.write(replace(FIGURES, step=2))
    monkeypatch.undo()
    assert "metrics cannot be written" in capsys.readouterr().err
    reporter.write(replace(FIGURES, step=3))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_lines_that_wait_are_written_when_the_rank_ends(
    reporter: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        reporter.write(FIGURES)
    assert lines(tmp_path) == []
    reporter.close()
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_words_that_a_full_disk_refuses_end_no_rank() -> None:
    outlet = Outlet(io.FileIO("/dev/full", "wb"), encoding="utf-8", write_through=True)
    print("step 1", file=outlet, flush=True)
    print("step 2", file=outlet, flush=True)
    assert outlet.write("step 3") == 6
