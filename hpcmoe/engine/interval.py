"""When to save, and when to leave before the job's time is over: rank 0's plan, from measured times and the run's failures.

The other ranks hear of it in the step's reduction. Not for saving (hpcmoe.engine.checkpoint) nor for signals (engine.stop).
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpcmoe.config.schema import CheckpointConfig
from hpcmoe.engine.checkpoint import Checkpointer
from hpcmoe.runs.journal import Event, Journal
from hpcmoe.runs.lead import MEASURED, need_s
from hpcmoe.runs.mtbf import Mtbf, mtbf_of, span
from hpcmoe.runs.story import Attempt

MEASURE_AFTER_S = 60.0  # while no save was measured, the first one comes so soon
RECENT = 5  # saves, and
RECENT_STEPS = 20  # steps, that the measured times are taken from
RETRY_S = 30.0  # after a save that failed; longer if it failed slowly, twice as long after each further one,
RETRY_MOST_S = 600.0  # and never longer than this
RETRY_SHARE = 10  # times what the failed save took: a disk that stays full is not what training waits for
WORTH_TELLING = 1.25  # a choice whose seconds differ less from those told before, and whose steps less than
STEPS_WORTH_TELLING = 2.0  # so much, is not journalled


def young_daly_s(save_s: float, mtbf_s: float) -> float:
    """The time between saves that loses least to saving and to redoing together, to first order.

    J. W. Young, CACM 17(9), 1974, doi:10.1145/361147.361115; J. T. Daly, FGCS 22(3), 2006, doi:10.1016/j.future.2004.11.016.
    """
    return math.sqrt(2 * save_s * mtbf_s)


@dataclass(frozen=True)
class Choice:
    """An interval and what it was chosen from."""

    steps: int
    seconds: float
    save_s: float
    step_s: float
    mtbf: Mtbf
    bound: str | None  # what kept it from being Young's and Daly's

    @property
    def why(self) -> str:
        bound = f", {self.bound}" if self.bound else ""
        return (
            f"Young/Daly: {self.save_s:.2g} s a save, {self.step_s:.2g} s a step, "
            f"{span(self.mtbf.seconds)} between failures ({self.mtbf.source}){bound}"
        )


def choose(save_s: float, step_s: float, mtbf: Mtbf, most_s: float | None) -> Choice:
    """A save's whole time is its cost, although training is held for the copy only: writing slows steps and loads the disks."""
    seconds, bound = young_daly_s(save_s, mtbf.seconds), None
    if seconds < 2 * save_s:
        seconds, bound = 2 * save_s, "not more than half of the time in saving"
    if most_s is not None and seconds > most_s:
        seconds, bound = most_s, "at most checkpoint.max_interval_s"
    return Choice(max(1, int(seconds / step_s)), seconds, save_s, step_s, mtbf, bound)


def worth_telling(choice: Choice, told: Choice) -> bool:
    """The steps alone follow the step time, which is never quite the same."""
    seconds, steps = choice.seconds / told.seconds, choice.steps / told.steps
    return max(seconds, 1 / seconds) >= WORTH_TELLING or max(steps, 1 / steps) >= STEPS_WORTH_TELLING


def retry_s(took_s: float, failed_in_a_row: int) -> float:
    """Seconds until a save is tried again that failed after ``took_s``."""
    return min(RETRY_MOST_S, max(RETRY_S, RETRY_SHARE * took_s) * 2.0 ** min(failed_in_a_row - 1, 16))


@dataclass
class SavePlan:
    """Asked once a step. Times are those of this attempt, save times also of the ones before."""

    config: CheckpointConfig
    checkpointer: Checkpointer
    journal: Journal
    attempts: Sequence[Attempt]  # the run's, this one too
    nodes: int
    step: int  # that training continues after
    stop_lead_s: float
    measures_lead: bool = False  # for the next submission (hpcmoe.runs.lead)
    end: float | None = None  # when Slurm ends the job, epoch s; None: not known
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    choice: Choice | None = field(default=None, init=False)
    _told: Choice | None = field(default=None, init=False)
    _seen: int | None = field(default=None, init=False)  # saves measured at the last choice
    _need_told: float | None = field(default=None, init=False)
    _warned: bool = field(default=False, init=False)
    _warm: bool = field(default=False, init=False)
    _failures: int = field(default=0, init=False)  # saves in a row that are known to have failed
    _retry_at: float = field(default=0.0, init=False)  # while there are some; on the monotonic clock

    def __post_init__(self) -> None:
        self._since = self.clock()
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        if self.end is not None and self.end - self.now() < self.stop_lead_s:
            self.end = None  # no job is given less time than that: the clocks here and there disagree

    def done(self, seconds: float) -> None:
        """A step took ``seconds``. The attempt's first one, which warms up, does not count."""
        if self._warm:
            self._steps.append(seconds)
        self._warm = True
        saves = self.checkpointer.save_seconds
        if not self._steps or not saves or len(saves) == self._seen:
            return
        self._seen = len(saves)
        self._check_lead()
        self._tell_need()
        if self.config.interval is None:
            self._choose()

    def due(self, step: int) -> bool:
        """Whether to save after ``step``. The chosen interval never makes training wait for a save that is not done.

        After a save that failed no step is safe: it is tried again without waiting for a whole interval.
        """
        interval, passed = self.config.interval, self.clock() - self._since
        if self._retry_due():
            return True
        if interval == 0:
            return False
        if interval is not None and step % interval == 0:
            return True
        if self.checkpointer.in_flight():
            return False
        if self.config.max_interval_s is not None and passed >= self.config.max_interval_s:
            return True
        if interval is not None:
            return False
        return passed >= MEASURE_AFTER_S if self.choice is None else step - self.step >= self.choice.steps

    def _retry_due(self) -> bool:
        failures = self.checkpointer.failed_in_a_row
        if failures > self._failures:
            self._retry_at = self.clock() + retry_s(self.clock() - self._since, failures)
        self._failures = failures
        return failures > 0 and self.clock() >= self._retry_at and not self.checkpointer.in_flight()

    def started(self, step: int) -> None:
        """A save after ``step`` has begun."""
        self.step, self._since = step, self.clock()

    def leaving(self) -> bool:
        """Whether the running step must be the last, as the job ends before another one and a save could be done.

        Only where Slurm's warning would come too late: it knows better of a time limit that was changed since the start.
        """
        need = self._need()
        if self.end is None or need is None or need <= self.stop_lead_s:
            return False
        return self.end - self.now() < need

    def _choose(self) -> None:
        save_s = statistics.median(self.checkpointer.save_seconds[-RECENT:])
        mtbf = mtbf_of(self.attempts, self.nodes, self.now())
        self.choice = choice = choose(save_s, statistics.median(self._steps), mtbf, self.config.max_interval_s)
        if self._told is not None and not worth_telling(choice, self._told):
            return
        self._told = choice
        self.journal.append(
            "interval_chosen",
            steps=choice.steps,
            seconds=round(choice.seconds, 1),
            save_s=round(save_s, 4),
            step_s=round(choice.step_s, 4),
            mtbf_s=round(mtbf.seconds),
            failures=mtbf.failures,
            why=choice.why,
        )
        print(f"checkpoints every {choice.steps} steps, about {choice.seconds:.0f} s ({choice.why})", flush=True)

    def _need(self) -> float | None:
        if not self._steps or not self.checkpointer.save_seconds:
            return None
        return need_s(max(self._steps), max(self.checkpointer.save_seconds[-RECENT:]))

    def _tell_need(self) -> None:
        need, told = self._need(), self._need_told
        if not self.measures_lead or need is None or (told is not None and max(need / told, told / need) < WORTH_TELLING):
            return
        self._need_told = need
        self.journal.append(MEASURED, need_s=round(need, 1))

    def _check_lead(self) -> None:
        need = self._need()
        if self._warned or need is None or need <= self.stop_lead_s:
            return
        self._warned = True
        step_s, save_s = max(self._steps), max(self.checkpointer.save_seconds[-RECENT:])
        by_itself = self.end is not None
        self.journal.append(
            "lead_too_short",
            need_s=round(need, 1),
            stop_lead_s=self.stop_lead_s,
            step_s=round(step_s, 3),
            save_s=round(save_s, 3),
            by_itself=by_itself,
        )
        cure = "it leaves by itself in time" if by_itself else "raise resilience.stop_lead_s, or its last steps may be lost"
        print(
            f"WARNING: a step ({step_s:.1f} s) and a save ({save_s:.1f} s) need {need:.0f} s before the job's end, "
            f"resilience.stop_lead_s warns {self.stop_lead_s:.0f} s before it; {cure}",
            file=sys.stderr,
            flush=True,
        )


def measured_saves(events: Sequence[Event]) -> list[float]:
    """Seconds that the run's latest saves took, oldest first."""
    return [float(event["seconds"]) for event in events if event["event"] == "checkpoint_saved" and event.get("seconds")][
        -RECENT:
    ]


def end_of_job(events: Sequence[Event], attempt: str) -> float | None:
    """When Slurm ends the job of ``attempt``, as its arrival journalled it (epoch s)."""
    ends = [event.get("end_time") for event in events if event["event"] == "attempt_started" and event["attempt"] == attempt]
    return float(ends[-1]) if ends and ends[-1] is not None else None
