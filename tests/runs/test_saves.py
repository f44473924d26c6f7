"""How saving goes, from the journal alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcmoe.cli.saved import certificate_text, save_lines
from hpcmoe.runs.glance import glance
from hpcmoe.runs.life import JobView
from hpcmoe.runs.observe import view
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.saves import certificates_of, saves_of, saving_fails
from hpcmoe.runs.store import Record


def event(t: float, name: str, attempt: str = "7.0", **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": name, "attempt": attempt, **fields}


FAILING = [
    event(0, "attempt_started", job_id="7", restart=0),
    event(10, "checkpoint_saved", step=10, seconds=1.5, bytes=1000),
    event(20, "save_failed", step=20, reason="rank 1: OSError: [Errno 28] No space left on device"),
    event(30, "attempt_started", attempt="7.1", job_id="7", restart=1),
    event(31, "resumed", attempt="7.1", step=10, checkpoint="step-00000010"),
    event(40, "save_failed", attempt="7.1", step=20, reason="rank 1: OSError: [Errno 122] Disk quota exceeded"),
]


def test_saves_that_go_on_failing_are_told_over_attempts_with_the_newest_checkpoint() -> None:
    saves = saves_of(FAILING)
    assert (saves.step, saves.failed_in_a_row, saves.save_s) == (10, 2, 1.5)
    assert save_lines(saves, now=100.0) == [
        "newest checkpoint: step 10, saved in 1.5 s",
        "SAVING FAILS: the last 2 saves failed, the latest 1m00s ago: rank 1: OSError: [Errno 122] Disk quota exceeded",
    ]


def test_a_table_of_runs_tells_of_a_running_one_whose_saves_fail() -> None:
    words = "SAVING FAILS, 2 in a row: rank 1: OSError: [Errno 122] Disk quota exceeded"
    run = RunDir(Path("/nowhere"))
    for job, reason in (("RUNNING", words), ("COMPLETED", None)):
        events = [event(-1, "submitted", job_id="7"), *FAILING, *([event(50, "finished", state=job)] if reason is None else [])]
        assert glance(view(Record(run, events, given_metrics=[]), JobView(job), 100.0), 100.0).reason == reason
    assert saving_fails([*FAILING, event(50, "checkpoint_saved", step=30)]) is None


def test_a_save_that_works_again_ends_the_alarm() -> None:
    saves = saves_of([*FAILING, event(50, "checkpoint_saved", attempt="7.1", step=30, seconds=2.0, bytes=1000)])
    assert (saves.step, saves.failed_in_a_row, saves.reason) == (30, 0, None)
    assert save_lines(saves, now=100.0) == ["newest checkpoint: step 30, saved in 2.0 s"]


def test_the_chosen_interval_and_a_lead_that_is_too_short_are_told() -> None:
    events = [
        event(0, "attempt_started"),
        event(5, "interval_chosen", steps=120, seconds=600.0, why="Young/Daly: ..."),
        event(6, "lead_too_short", need_s=175.0, stop_lead_s=120, by_itself=False),
    ]
    assert save_lines(saves_of(events), now=10.0) == [
        "a checkpoint every 120 steps, about 10m00s (Young/Daly: ...)",
        "WARNING: a step and a save need 175 s before the job's end, resilience.stop_lead_s is 120 s: "
        "raise resilience.stop_lead_s",
    ]
    assert saves_of([*events, event(9, "attempt_started", attempt="7.1")]).lead_need_s is None, "of this attempt only"


def test_certificates_are_listed_one_resume_after_the_other() -> None:
    samples = {"count": 16, "ids": list(range(16)), "digest": "ab12"}
    base = {"checkpoint": "step-00000010", "tokens": 2560, "made_by": "7.0", "layout": "pp=1", "world_size": 2}
    figures = {"loss": 2.5, "grad_norm": 0.25, "before": {"attempt": "7.0", "loss": 2.5, "grad_norm": 0.25}}
    events = [
        event(31, "resumed", "7.1", step=10, **base),
        event(32, "next_samples", "7.1", step=11, **samples),
        event(33, "certified", "7.1", step=11, verdict="identical", reason=None, **figures),
        event(41, "resumed", "7.2", step=20, **base | {"checkpoint": "step-00000020"}),
        event(43, "certified", "7.2", step=21, verdict="differs", reason="loss 1.0 now, 2.0 in attempt 7.1"),
        event(51, "resumed", "7.3", step=20, checkpoint="step-00000020"),
        event(52, "first_step", "7.3", step=21),
    ]
    assert certificate_text(certificates_of(events)).splitlines() == [
        "3 resumes: 1 bit-identical, 1 DIFFERS, 1 not comparable",
        "  7.1 from step-00000010 (2560 tokens, made by attempt 7.0)",
        "    on 2 ranks: pp=1",
        "    next 16 samples: 0, 1, 2, 3, 4, 5, 6, 7, ... (digest ab12)",
        "    step 11 bit-identical: loss 2.5 and gradient norm 0.25, as in attempt 7.0",
        "  7.2 from step-00000020 (2560 tokens, made by attempt 7.0)",
        "    on 2 ranks: pp=1",
        "    step 21 DIFFERS: loss 1.0 now, 2.0 in attempt 7.1",
        "  7.3 from step-00000020 (tokens unknown)",
        "    step 21 not comparable: no certificate was kept of its first step",
    ]
    assert certificate_text([]) == "no resume yet: nothing to certify"
