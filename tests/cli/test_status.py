"""What `hpcmoe status` shows of runs whose journals are given. Nothing runs, and nobody is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.cli import status

JOURNAL: list[dict[str, Any]] = [
    {"t": 0.0, "event": "planned", "cluster": "testbed", "nodes": 2, "gpus_per_node": 4, "steps": 60, "scheduler": "slurm"},
    {"t": 1.0, "event": "submitted", "job_id": "7"},
    {"t": 100.0, "event": "attempt_started", "attempt": "7.0", "job_id": "7", "restart": 0, "nodes": 2, "gpus": 8},
    {"t": 101.0, "event": "attempt_ended", "attempt": "7.0", "cause": "preempted"},
    {"t": 200.0, "event": "attempt_started", "attempt": "7.1", "job_id": "7", "restart": 1, "nodes": 2, "gpus": 8},
    {"t": 208.0, "event": "first_step", "attempt": "7.1", "step": 1, "startup": {"imports": 4.25, "first_step": 0.5}},
    {"t": 260.0, "event": "attempt_ended", "attempt": "7.1", "cause": "completed"},
    {"t": 260.0, "event": "finished", "attempt": "7.1", "state": "COMPLETED", "reason": None},
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "abc123"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in JOURNAL))
    (folder / "metrics.jsonl").write_text(json.dumps({"attempt": "7.1", "step": 1, "t": 208.0, "loss": 5.0}) + "\n")
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path))
    return folder


def test_one_line_tells_where_an_attempts_start_up_time_went(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["abc123"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "first step" in line]
    assert lines == ["  7.1: 8.0 s to its first step (launch 3.2, imports 4.2, first step 0.5)"]


def test_scripts_get_the_parts_in_seconds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["abc123", "--json"]) == 0
    attempts = json.loads(capsys.readouterr().out)["attempts"]
    assert [attempt["startup"] for attempt in attempts] == [{}, {"launch": 3.25, "imports": 4.25, "first_step": 0.5}]


def test_the_progress_line_tells_of_skipped_steps_and_of_the_last_evaluation(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [
        {"attempt": "7.1", "step": 2, "t": 209.0, "loss": 4.5, "eval_step": 2, "eval_loss": 4.25},
        {"attempt": "7.1", "step": 3, "t": 210.0, "loss": None, "skipped": "not finite", "skipped_steps": 2},
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in more)
    assert status.main(["abc123"]) == 0
    expected = "step 3 of 60: loss not finite, held out 4.2500 after step 2, 0 tokens/s, 2 steps skipped"
    assert expected in capsys.readouterr().out.splitlines()


def test_an_elastic_run_tells_its_layouts_and_a_run_the_nodes_it_stays_away_from(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": 8,
        "tp": 1,
        "ep": 4,
        "schedule": "1F1B",
        "microbatch": 2,
        "recompute": "none",
    }
    more = [
        {"t": 99.0, "event": "laid_out", "attempt": "7.0", "nodes": 2, "nodes_before": None, "layout": layout},
        {"t": 199.0, "event": "laid_out", "attempt": "7.1", "nodes": 2, "nodes_before": 2, "layout": layout},
        {"t": 261.0, "event": "nodes_excluded", "attempt": "7.1", "job_id": "7", "nodes": ["n0003"]},
    ]
    planned = JOURNAL[0] | {"min_nodes": 1}
    events = sorted([planned, *JOURNAL[1:], *more], key=lambda event: event["t"])
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert status.main(["abc123"]) == 0
    out = capsys.readouterr().out
    assert "on testbed, 1..2 x 4 ranks" in out
    lines = [line for line in out.splitlines() if "laid out" in line or "stay away" in line]
    assert lines == [
        "  7.0: laid out on 2 nodes: dp_shard 8, ep 4, microbatch 2",
        "  7.1: job 7 is to stay away from n0003",
    ]


def test_a_sum_of_lost_steps_that_may_be_too_low_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = JOURNAL[6] | {"cause": "crashed", "last_step": 9}
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*JOURNAL[:6], ended]))
    assert status.main(["abc123"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].endswith("over 2 attempts, >=9 steps lost")
