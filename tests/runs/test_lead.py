"""How long before its time limit a run is told to leave, where that is measured."""

from __future__ import annotations

from typing import Any

import pytest

from hpcmoe.runs.budget import budgets_of
from hpcmoe.runs.lead import CAP_S, FLOOR_S, MEASURED, UNMEASURED_S, lead_of_job_s, next_lead_s


def measured(*needs: float) -> list[dict[str, Any]]:
    return [{"t": 1.0, "event": MEASURED, "attempt": "7.0", "need_s": need} for need in needs]


@pytest.mark.parametrize(
    ("given", "needs", "limit", "lead"),
    [
        (90, [500.0], None, 90),
        ("auto", [], None, UNMEASURED_S),
        ("auto", [500.0, 317.2], None, 318),  # the newest
        ("auto", [12.0], None, FLOOR_S),
        ("auto", [1e6], "4-00:00:00", CAP_S),
        ("auto", [900.0], "20", 600),  # half of twenty minutes
        ("auto", [900.0], "UNLIMITED", 900),
        ("auto", [], "2", 60),
    ],
)
def test_the_next_submission_asks_for_what_was_measured_between_a_floor_and_a_cap(
    given: int | str, needs: list[float], limit: str | None, lead: int
) -> None:
    assert next_lead_s(given, measured(*needs), limit) == lead


def test_a_job_keeps_the_lead_that_it_was_submitted_with() -> None:
    first = {"t": 0.0, "event": "submitted", "job_id": "7"}
    second = {"t": 2.0, "event": "submitted", "job_id": "8", "stop_lead_s": 318}
    events = [first, *measured(317.2), second, *measured(900.0)]
    assert [lead_of_job_s("auto", events, job) for job in ("7", "8", "9")] == [UNMEASURED_S, 318, UNMEASURED_S]
    assert lead_of_job_s(90, events, "8") == 90


def test_the_last_gpu_hours_are_kept_for_a_lead_that_was_measured() -> None:
    config = {"resilience": {"stop_lead_s": "auto"}}
    assert budgets_of(config).stop_lead_s == UNMEASURED_S
    assert budgets_of(config, None, measured(500.0)).stop_lead_s == 500
