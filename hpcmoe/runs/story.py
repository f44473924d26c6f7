"""What the journal and the metrics say about a run's attempts. Pure: reads values, asks nobody, writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpcmoe.runs.journal import Event

HOUR_S = 3600.0


@dataclass(frozen=True)
class Attempt:
    """One start of the run on an allocation. Times are epoch seconds; steps are optimizer steps, counted from 1."""

    attempt: str
    job_id: str
    restart: int
    started: float
    ended: float | None = None
    end_estimated: bool = False  # nobody saw the end; the time is that of the last sign of life
    cause: str | None = None  # why it ended; None: it has not, or nobody knows yet
    detail: str | None = None
    gpus: int = 0
    nodes: int = 0
    hosts: tuple[str, ...] = ()
    resumed_from: int = 0  # step of the checkpoint it started from; 0: from scratch
    first_step: int | None = None
    last_step: int | None = None
    saved_step: int | None = None  # newest durable checkpoint that this attempt published
    steps_lost: int | None = None  # steps done here that nobody could continue from; at least so many, if any are
    steps_unwritten: int = 0  # done as signs of life show, but without a line: the disk was full, and the rank was killed
    left: bool = False  # it was warned, and had its say: saved, or at least tried to
    engine: str = "hpcmoe"  # or command: what its steps are worth is only known from outside
    progressed: bool = False  # a command got on: by a new checkpoint, or by a step that none had reached
    save_s: float | None = None  # seconds the leaving save took
    startup: dict[str, float] = field(default_factory=dict)  # seconds to the first step, by part, in their order; rank 0's
    restart_s: float | None = None  # from the previous attempt's end to this one's first step

    @property
    def open(self) -> bool:
        return self.cause is None

    def held_s(self, now: float) -> float:
        """Seconds on its nodes, up to ``now`` for an attempt that still runs; never negative, whatever clocks did."""
        end = self.ended if self.ended is not None else now
        return max(0.0, end - self.started)

    def gpu_hours(self, now: float) -> float:
        """GPUs allocated x hours held."""
        return self.gpus * self.held_s(now) / HOUR_S

    def as_json(self, now: float) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "job_id": self.job_id,
            "restart": self.restart,
            "cause": self.cause,
            "detail": self.detail,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "resumed_from": self.resumed_from,
            "steps_lost": self.steps_lost,
            "steps_unwritten": self.steps_unwritten,
            "gpu_hours": self.gpu_hours(now),
            "started": self.started,
            "ended": self.ended,
            "end_estimated": self.end_estimated,
            "nodes": self.nodes,
            "hosts": list(self.hosts),
            "save_s": self.save_s,
            "restart_s": self.restart_s,
            "startup": self.startup,
        }


def _step_ranges(metrics: Iterable[dict[str, Any]]) -> dict[str, tuple[int, int, float]]:
    """For each attempt: first step, last step, time of its last line."""
    ranges: dict[str, tuple[int, int, float]] = {}
    for line in metrics:
        attempt, step = line.get("attempt"), line.get("step")
        if not isinstance(attempt, str) or not isinstance(step, int):
            continue
        first, last, _ = ranges.get(attempt, (step, step, 0.0))
        ranges[attempt] = (min(first, step), max(last, step), float(line.get("t") or 0.0))
    return ranges


def _apply(attempt: Attempt, event: Event) -> Attempt:
    """One journal line about this attempt."""
    match event["event"]:
        case "resumed":
            return replace(attempt, resumed_from=int(event["step"]))
        case "first_step":
            return replace(attempt, startup=_startup(attempt, event), first_step=event.get("step"))
        case "checkpoint_saved":
            return replace(attempt, saved_step=max(attempt.saved_step or 0, int(event["step"])))
        case "left":
            return replace(attempt, save_s=event.get("save_s"), left=True)
        case "progressed":
            return replace(attempt, progressed=True)
        case "attempt_ended":
            return replace(
                attempt,
                cause=event["cause"],
                detail=event.get("detail"),
                ended=float(event.get("ended") or event["t"]),
                end_estimated=bool(event.get("end_estimated")),
                last_step=event.get("last_step"),
            )
    return attempt


def _startup(attempt: Attempt, event: Event) -> dict[str, float]:
    """What rank 0 measured from its first line on, by part; before these "launch": from the job script's arrival to that line."""
    measured = {str(part): float(seconds) for part, seconds in (event.get("startup") or {}).items()}
    if not measured:
        return {}
    launch = float(event["t"]) - sum(measured.values()) - attempt.started
    return {"launch": round(max(0.0, launch), 3), **measured}


def _lost(attempt: Attempt, next_resumed_from: int | None, durable: int) -> int | None:
    """Steps of work that are gone. Known once it ended: nobody can then continue from a later step than the newest checkpoint."""
    if attempt.engine == "command":
        return None
    if attempt.last_step is None:
        return 0 if not attempt.open else None
    if next_resumed_from is not None:
        return max(0, attempt.last_step - next_resumed_from)
    return None if attempt.open else max(0, attempt.last_step - durable)


def attempts_of(events: Sequence[Event], metrics: Iterable[dict[str, Any]]) -> list[Attempt]:
    """Every attempt in the order of their starts, with steps, losses and times."""
    found: dict[str, Attempt] = {}
    first_step_at: dict[str, float] = {}
    for event in events:
        name = event.get("attempt")
        if event["event"] == "attempt_started" and isinstance(name, str):
            found.setdefault(
                name,
                Attempt(
                    attempt=name,
                    job_id=str(event["job_id"]),
                    restart=int(event["restart"]),
                    started=float(event["t"]),
                    gpus=int(event.get("gpus") or 0),
                    nodes=int(event.get("nodes") or 0),
                    hosts=tuple(event.get("hosts") or ()),
                    engine=str(event.get("engine") or "hpcmoe"),
                ),
            )
        elif name in found:
            if event["event"] == "first_step":
                first_step_at.setdefault(name, float(event["t"]))
            found[name] = _apply(found[name], event)
    ranges = _step_ranges(metrics)
    attempts = [_with_steps(attempt, ranges.get(attempt.attempt)) for attempt in found.values()]
    return _with_losses(attempts, first_step_at)


def _with_steps(attempt: Attempt, steps: tuple[int, int, float] | None) -> Attempt:
    """The metrics have every step that was written; the journal may know of later ones (hpcmoe.runs.arrive.work_done)."""
    if attempt.engine == "command":
        return attempt if steps is None else replace(attempt, first_step=steps[0], last_step=steps[1])
    written = steps[1] if steps is not None else attempt.resumed_from
    unwritten = max(0, (attempt.last_step or 0) - written)
    if steps is None:
        return replace(attempt, last_step=attempt.last_step if unwritten else None, steps_unwritten=unwritten)
    return replace(attempt, first_step=steps[0], last_step=written + unwritten, steps_unwritten=unwritten)


def _with_losses(attempts: list[Attempt], first_step_at: dict[str, float]) -> list[Attempt]:
    complete: list[Attempt] = []
    durable = 0
    for index, attempt in enumerate(attempts):
        durable = max(durable, attempt.saved_step or 0)
        following = attempts[index + 1] if index + 1 < len(attempts) else None
        # The next attempt's starting point is known once it has made a step; before that it may still be loading.
        resumed_from = following.resumed_from if following is not None and following.first_step is not None else None
        previous = attempts[index - 1] if index else None
        began = first_step_at.get(attempt.attempt)
        restart_s = began - previous.ended if began is not None and previous and previous.ended else None
        complete.append(replace(attempt, steps_lost=_lost(attempt, resumed_from, durable), restart_s=restart_s))
    return complete


def last_sign_of_life(attempt: str, events: Iterable[Event], metrics: Iterable[dict[str, Any]]) -> float | None:
    """Epoch seconds of the last thing this attempt wrote anywhere."""
    times = [float(event["t"]) for event in events if event.get("attempt") == attempt]
    times += [float(line["t"]) for line in metrics if line.get("attempt") == attempt and "t" in line]
    return max(times, default=None)


@dataclass(frozen=True)
class Goodput:
    """How much of what was done, and of the time, went into steps that the run still stands on. Times are seconds."""

    useful_steps: int
    all_steps: int  # done, those done again too
    useful_s: float  # that the useful steps took
    held_s: float  # on nodes, over all attempts
    wall_s: float  # from the first attempt's start on: the queue between attempts, too

    @property
    def of_steps(self) -> float | None:
        return self.useful_steps / self.all_steps if self.all_steps else None

    @property
    def of_held(self) -> float | None:
        return self.useful_s / self.held_s if self.held_s else None

    @property
    def of_wall(self) -> float | None:
        return self.useful_s / self.wall_s if self.wall_s else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"of_steps": self.of_steps, "of_held": self.of_held, "of_wall": self.of_wall}


def goodput_of(attempts: Sequence[Attempt], metrics: Iterable[dict[str, Any]], now: float) -> Goodput:
    """Up to ``now``, or to the last attempt's end. Steps that a running attempt has not saved yet count as useful."""
    useful: dict[int, float] = {}
    done, writer = 0, None
    for line in metrics:
        step = line.get("step")
        if not isinstance(step, int) or "seconds" not in line:
            continue  # a command's log does not tell every step, nor how long it took
        if line.get("attempt") != writer:  # an attempt continues from a checkpoint; what came after it is gone
            writer = line.get("attempt")
            useful = {earlier: seconds for earlier, seconds in useful.items() if earlier < step}
        useful[step] = float(line.get("seconds") or 0.0)
        done += 1
    done += sum(attempt.steps_unwritten for attempt in attempts)
    last = attempts[-1] if attempts else None
    if last is not None and not last.open and last.attempt == writer and last.steps_lost and last.last_step is not None:
        useful = {step: seconds for step, seconds in useful.items() if step <= last.last_step - last.steps_lost}
    end = now if last is None or last.ended is None else last.ended
    return Goodput(
        useful_steps=len(useful),
        all_steps=done,
        useful_s=sum(useful.values()),
        held_s=sum(attempt.held_s(now) for attempt in attempts),
        wall_s=max(0.0, end - attempts[0].started) if attempts else 0.0,
    )
