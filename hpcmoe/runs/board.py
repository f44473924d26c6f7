"""What `hpcmoe watch` shows of many runs, kept current: directories, Slurm's answers, places in the queue. Draws nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcmoe.runs.glance import Glance, Glancer, glance
from hpcmoe.runs.life import JobView
from hpcmoe.runs.observe import RunView, ask, views
from hpcmoe.runs.rundir import RunDir
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.places import QueuePlace

PLACES_EVERY_S = 60.0  # the whole queue is read for them
FORGOTTEN_FOR_S = 60.0  # so long accounting is not asked again about a job that squeue no longer lists
BY_NEED = ("RUNNING", "QUEUED", "UNKNOWN", "STOPPED", "PLANNED", "FAILED", "CANCELLED", "COMPLETED")


@dataclass(frozen=True)
class Line:
    """One run on the board."""

    run: Glance
    view: RunView
    place: QueuePlace | None = None  # of a job that waits
    starts: float | None = None  # epoch s, as Slurm expects it now, of a job that waits

    def as_json(self) -> dict[str, Any]:
        place = {} if self.place is None else {"place": self.place.place, "place_of": self.place.of}
        return {**asdict(self.run), "expected_start": self.starts, "place": None, "place_of": None, **place}


class Board:
    """Polls as often as it is told to: one squeue; one sacct when a job has gone from it; once a minute the queue's order."""

    def __init__(self, runs: Callable[[], Sequence[RunDir]], root: Path | None = None) -> None:
        """``root``: where they lie, for what is remembered there."""
        self._runs = runs  # asked at every poll: runs come and go
        self._glancer = Glancer(root)
        self._accounted: dict[str, tuple[float, JobView]] = {}
        self._places: dict[str, QueuePlace] = {}
        self._placed_at = 0.0

    def poll(self, now: float, patient: bool = True) -> list[Line]:
        """All runs: those that run first, then those that wait, then the ended ones; the newest first in each.

        ``patient``: never a third command in one poll; places are then told a poll later.
        """
        records = self._glancer.read_all(self._runs())
        clock = time.monotonic()
        self._accounted = {job: told for job, told in self._accounted.items() if clock - told[0] < FORGOTTEN_FOR_S}
        answers = ask(records, {job: told[1] for job, told in self._accounted.items()})
        asked_accounting = bool(answers.gone - set(self._accounted))
        self._accounted |= {job: (clock, answers.jobs[job]) for job in answers.gone if job not in self._accounted}
        seen = views(records, answers, now)
        waiting = {str(run.record.job_id) for run in seen if run.state == "QUEUED" and run.job.state == "PENDING"}
        due = not self._placed_at or clock - self._placed_at > PLACES_EVERY_S
        if waiting and due and not (patient and asked_accounting):
            self._places, self._placed_at = self._ask_places(waiting), clock
        lines = [self._line(run, now) for run in seen]
        return sorted(lines, key=lambda line: (_need(line.run.state), -line.run.created, line.run.run_id))

    def _line(self, run: RunView, now: float) -> Line:
        waits = run.state == "QUEUED"
        place = self._places.get(str(run.record.job_id)) if waits else None
        return Line(glance(run, now), run, place, run.job.start if waits else None)

    def _ask_places(self, job_ids: set[str]) -> dict[str, QueuePlace]:
        try:
            return client.places(job_ids)
        except SlurmError:
            return {}  # the states' own question says what is wrong


def _need(state: str) -> int:
    return BY_NEED.index(state) if state in BY_NEED else 0
