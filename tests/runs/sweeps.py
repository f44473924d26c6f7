"""Sweeps on disk for tests: runs with journals and metrics as a real sweep leaves them. Nothing runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpcmoe.runs.sweep import SweepDir, SweepPoint, create_sweep

BEGAN = 1_000.0


def write_run(root: Path, run_id: str, *events: dict[str, Any], metrics: Iterable[dict[str, Any]] = ()) -> Path:
    folder = root / run_id
    folder.mkdir(parents=True)
    lines = [{"t": BEGAN + number, "attempt": None, **event} for number, event in enumerate(events)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return folder


def planned(**more: Any) -> dict[str, Any]:
    return {"event": "planned", "name": "tiny", "engine": "hpcmoe", "scheduler": "slurm", "steps": 3, **more}


def started(job: str, restart: int = 0) -> dict[str, Any]:
    return {
        "event": "attempt_started",
        "attempt": f"{job}.{restart}",
        "job_id": job,
        "restart": restart,
        "gpus": 4,
        "nodes": 1,
        "t": BEGAN,
    }


def ended(job: str, cause: str, detail: str | None = None) -> dict[str, Any]:
    """After half an hour."""
    return {"event": "attempt_ended", "attempt": f"{job}.0", "cause": cause, "detail": detail, "t": BEGAN + 1800.0}


def finished(state: str, reason: str | None = None, last_lines: Sequence[str] = ()) -> dict[str, Any]:
    return {"event": "finished", "state": state, "reason": reason, "last_lines": list(last_lines), "t": BEGAN + 1800.0}


def steps(losses: Sequence[float | None], job: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": loss,
            "tokens_per_s": 100.0 * step,
            "seconds": 1.0,
            "attempt": f"{job}.0",
            "t": BEGAN + step,
            **more,
        }
        for step, loss in enumerate(losses, 1)
    ]


def write_sweep(root: Path, points: Iterable[SweepPoint], sweep_id: str = "swp001", **policy: Any) -> SweepDir:
    sweep = create_sweep(
        root / "sweeps" / sweep_id, launcher="hpcmoe", overrides=["optim.lr=1e-4,3e-4"], policy=policy, root=root
    )
    sweep.append_points(points)
    return sweep


def small_sweep(root: Path) -> SweepDir:
    """Five points: one completed, one failed, one held back, a duplicate, and one whose directory somebody deleted."""
    write_run(
        root,
        "aaaaaa",
        planned(),
        {"event": "submitted", "job_id": "7_0"},
        started("7_0"),
        ended("7_0", "completed"),
        finished("COMPLETED"),
        metrics=steps([5.0, 3.0, 4.0], "7_0"),
    )
    write_run(
        root,
        "bbbbbb",
        planned(),
        {"event": "submitted", "job_id": "7_1"},
        started("7_1"),
        ended("7_1", "crashed", "rank0: RuntimeError: lr is too high"),
        finished("FAILED", "3 attempts without progress", ["rank-0000.log:", "Traceback", "bye"]),
        metrics=steps([6.0, None], "7_1"),
    )
    write_run(root, "cccccc", planned())
    write_run(root, "dddddd", planned(), started("3"), ended("3", "completed"), finished("COMPLETED"), metrics=steps([2.5], "3"))
    same = ("model=tiny",)
    return write_sweep(
        root,
        [
            SweepPoint(0, ("optim.lr=1e-4", "train.seed=0", *same), "k0", "aaaaaa", gpu_hours=1.0),
            SweepPoint(1, ("optim.lr=3e-4", "train.seed=0", *same), "k1", "bbbbbb", gpu_hours=1.0),
            SweepPoint(2, ("optim.lr=1e-4", "train.seed=1", *same), "k2", "cccccc"),
            SweepPoint(3, ("optim.lr=3e-4", "train.seed=1", *same), "k3", None, same_as="dddddd"),
            SweepPoint(4, ("optim.lr=1e-3", "train.seed=1", *same), "k4", "eeeeee"),
        ],
        throttle=2,
    )
