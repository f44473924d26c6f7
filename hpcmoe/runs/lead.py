"""How long before the end of its time a run is told to leave: `resilience.stop_lead_s`, a number or ``auto``. Pure.

A job keeps the lead that it was submitted with (sbatch's --signal), however often it is requeued: what is measured while it runs
is for the next submission. Until then the ranks leave by themselves where the lead is too short (hpcmoe.engine.interval).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcmoe.runs.journal import Event

AUTO = "auto"
UNMEASURED_S = 120  # of a job about which nothing is known yet
FLOOR_S, CAP_S = 60, 3600  # Slurm looks at time limits twice a minute; nobody's save needs an hour
MEASURED = "lead_measured"

MARGIN = 1.5  # on what a step and a save took, for the next ones may take longer
DEPART_S = 10.0  # until the job script has seen to what follows


def need_s(step_s: float, save_s: float) -> float:
    """Seconds before the job's end at which the run must begin to leave: one more step, a save, the job script's last words.

    And a save that may be in flight then, which is awaited first.
    """
    return MARGIN * (step_s + save_s) + save_s + DEPART_S


def next_lead_s(given: int | str, events: Sequence[Event], limit: str | None = None) -> int:
    """What the run's next submission asks for: with ``auto`` what was measured last, and never more than half of the time limit
    (``limit``, in Slurm's words).
    """
    if given != AUTO:
        return int(given)
    needs = [float(event["need_s"]) for event in events if event["event"] == MEASURED]
    lead = min(CAP_S, max(FLOOR_S, math.ceil(needs[-1]))) if needs else UNMEASURED_S
    if limit is None:
        return lead
    from hpcmoe.slurm.parse import parse_duration  # here, as the engine knows no Slurm

    seconds = parse_duration(limit)
    return lead if seconds is None else max(1, min(lead, int(seconds // 2)))


def lead_of_job_s(given: int | str, events: Sequence[Event], job_id: str) -> int:
    """What the job was submitted with."""
    if given != AUTO:
        return int(given)
    told = [event.get("stop_lead_s") for event in events if event["event"] == "submitted" and event["job_id"] == job_id]
    return int(told[-1]) if told and told[-1] is not None else UNMEASURED_S
