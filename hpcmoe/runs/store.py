"""Reading a run as a whole, and recording what was learnt about it. Disk only: Slurm is asked by hpcmoe.runs.observe."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcmoe.files import read_json, write_json
from hpcmoe.runs.gist import Gist, gist_of
from hpcmoe.runs.journal import Event, Journal, iter_json_lines, last_json_line, read_journal
from hpcmoe.runs.life import Life, fold
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.story import Attempt, attempts_of


@dataclass(frozen=True)
class Record:
    """A run as its directory tells it: the journal at one moment; what is in metrics.jsonl when it is first asked for.

    A long run's metrics take a tenth of a second to read, and its journal a thousandth: tables of many runs ask for ``last_line``
    and ``gist`` only.
    """

    run: RunDir
    given_events: list[Event] | None  # None: they are in the run directory
    given_metrics: list[dict[str, Any]] | None = None  # likewise
    given_gist: Gist | None = None  # what is remembered of the journal

    @cached_property
    def events(self) -> list[Event]:
        """The journal."""
        return read_journal(self.run.journal) if self.given_events is None else self.given_events

    @cached_property
    def gist(self) -> Gist:
        """What a line of a table needs of the journal."""
        return gist_of(self.events) if self.given_gist is None else self.given_gist

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One line a step, oldest first."""
        return list(iter_json_lines(self.run.metrics)) if self.given_metrics is None else self.given_metrics

    @cached_property
    def last_line(self) -> dict[str, Any] | None:
        """The newest line of metrics.jsonl, from the end of the file; None: no step was made yet."""
        if self.given_metrics is None and "metrics" not in self.__dict__:
            return last_json_line(self.run.metrics)
        return self.metrics[-1] if self.metrics else None

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Every attempt with its steps and losses. Reads all metrics."""
        return attempts_of(self.events, self.metrics)

    @property
    def planned(self) -> Event:
        """The run's first event; what it was meant to be."""
        return self.gist.planned

    @property
    def steps_seen(self) -> bool:
        """False: a command trains, and no pattern says how to read its steps from its log."""
        return bool(self.planned.get("steps_seen", True))

    @property
    def scheduler(self) -> str:
        return str(self.planned.get("scheduler", "slurm"))

    @property
    def life(self) -> Life:
        """Where the run stands by its journal."""
        return self.gist.life

    @property
    def finished(self) -> Event | None:
        """The event that ended or rested the run, unless its user resumed it after that."""
        return self.life.ended

    @property
    def job_id(self) -> str | None:
        """The Slurm job (or local job) that carries the run now, or did last."""
        return self.life.job_id

    @property
    def attempts_since_resume(self) -> list[Attempt]:
        """The attempts that count for the crash budget: a user who resumes a run by hand gives it a new one."""
        resumed = max(
            (event["t"] for event in self.events if event["event"] == "submitted" and event.get("how") == "resume"), default=0.0
        )
        return [attempt for attempt in self.attempts if attempt.ended is None or attempt.ended > resumed]


def read_record(run: RunDir) -> Record:
    return Record(run, read_journal(run.journal))


def raw_config(run: RunDir) -> dict[str, Any]:
    """The frozen config as plain values. For rooms that must start fast; others load it with hpcmoe.config.freeze."""
    import yaml  # here, since a table of runs needs none

    loaded = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict), f"{run.config} is not a mapping"
    return loaded


def runs_command(config: dict[str, Any]) -> bool:
    """Does something else than hpcmoe's own engine train? A config may be older than the question."""
    return bool((config.get("engine") or {}).get("name") == "command")


def finish(run: RunDir, state: str, reason: str | None, attempt: str | None = None, **fields: Any) -> None:
    """Close the run for good, in the journal and in result.json (what the next job reads in order to leave at once).

    Of two that do so at once the first counts: a run that is over keeps its result.
    """
    if fold(read_journal(run.journal)).finished:
        return
    event = Journal(run.journal, attempt).append("finished", state=state, reason=reason, **fields)
    write_json(run.result, {"run_id": run.run_id, "state": state, "reason": reason, "t": event["t"], **fields})


def result_of(run: RunDir) -> dict[str, Any]:
    """What result.json says: ``state``, ``reason``, ``t`` (epoch s); empty while the run is not over."""
    result = read_json(run.result)
    return result if isinstance(result, dict) else {}


def result_state(run: RunDir) -> str | None:
    """COMPLETED, FAILED or CANCELLED when the run is over; None while it is not."""
    result = result_of(run)
    return str(result["state"]) if "state" in result else None


def reopen(run: RunDir) -> None:
    """Make a finished or stopped run startable again. Its earlier result is kept beside the new one."""
    with contextlib.suppress(FileNotFoundError):
        (run.control / "stop").unlink()
    if run.result.exists():
        number = 1
        while (kept := run.path / f"result.{number}.json").exists():
            number += 1
        run.result.rename(kept)


def rank_logs(run: RunDir, rank: int) -> list[Path]:
    """Rank logs of all attempts, oldest attempt first, as far as they exist."""
    started = [event["attempt"] for event in read_journal(run.journal) if event["event"] == "attempt_started"]
    return [path for attempt in started if (path := run.rank_log(str(attempt), rank)).exists()]
