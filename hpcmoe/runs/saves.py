"""What the journal says of a run's checkpoints: the newest, how saving goes, how every resume is certified. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcmoe.runs.journal import Event


@dataclass(frozen=True)
class Saves:
    """How saving goes. Steps are optimizer steps, times epoch seconds."""

    step: int | None = None  # of the newest checkpoint; None: there is none
    saved: float | None = None
    save_s: float | None = None  # what it took, from its start to its name
    bytes: int | None = None
    failed_in_a_row: int = 0  # saves since then
    failed: float | None = None  # when the latest of these failed
    reason: str | None = None  # of that
    interval_steps: int | None = None  # as chosen by the run itself
    interval_s: float | None = None
    interval_why: str | None = None
    lead_need_s: float | None = None  # measured: a step and a save need so much, more than resilience.stop_lead_s
    stop_lead_s: float | None = None
    leaves_by_itself: bool = False  # the ranks know the job's end and leave in time

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def saves_of(events: Sequence[Event]) -> Saves:
    """At the journal's end."""
    saves = Saves()
    for event in events:
        match event["event"]:
            case "checkpoint_saved":
                newest = replace(
                    saves, step=event["step"], saved=event["t"], save_s=event.get("seconds"), bytes=event.get("bytes")
                )
                saves = replace(newest, failed_in_a_row=0, failed=None, reason=None)
            case "resumed":
                saves = replace(saves, step=event["step"])
            case "save_failed":
                count = saves.failed_in_a_row + 1
                saves = replace(saves, failed_in_a_row=count, failed=event["t"], reason=event.get("reason"))
            case "interval_chosen":
                saves = replace(
                    saves, interval_steps=event["steps"], interval_s=event.get("seconds"), interval_why=event.get("why")
                )
            case "attempt_started":
                saves = replace(saves, lead_need_s=None, stop_lead_s=None, leaves_by_itself=False)
            case "lead_too_short":
                by_itself = bool(event.get("by_itself"))
                saves = replace(saves, lead_need_s=event["need_s"], stop_lead_s=event["stop_lead_s"], leaves_by_itself=by_itself)
    return saves


def saving_fails(events: Sequence[Event]) -> str | None:
    """In words, where the newest save failed; for a line of a table."""
    count, reason = 0, None
    for event in reversed(events):
        if event["event"] == "checkpoint_saved":
            break
        if event["event"] == "save_failed":
            count, reason = count + 1, reason or event.get("reason")
    return f"SAVING FAILS, {count} in a row: {reason}" if count else None


@dataclass(frozen=True)
class Certificate:
    """From what an attempt continued, and whether its first step gave the bits that are on record."""

    attempt: str
    checkpoint: str
    step: int  # that the checkpoint is of
    tokens: int | None
    made_by: str | None  # attempt
    layout: str | None
    ranks: int | None
    samples: dict[str, Any] | None  # of the next step: count, ids (the first ones), digest (of all)
    verdict: str  # identical | differs | not_comparable
    reason: str | None
    loss: float | None = None
    grad_norm: float | None = None
    before: dict[str, Any] | None = None  # attempt, loss, grad_norm on record

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def certificates_of(events: Sequence[Event]) -> list[Certificate]:
    """One for every resume, in their order."""
    return [
        _certificate(event, [later for later in events if later["attempt"] == event["attempt"]])
        for event in events
        if event["event"] == "resumed"
    ]


def _certificate(resumed: Event, own: Sequence[Event]) -> Certificate:
    samples = next((event for event in own if event["event"] == "next_samples"), None)
    certified = next((event for event in own if event["event"] == "certified"), None)
    found: dict[str, Any]
    if certified is not None:
        found = {key: certified.get(key) for key in ("reason", "loss", "grad_norm", "before")} | {"verdict": certified["verdict"]}
    elif any(event["event"] == "first_step" for event in own):
        found = {"verdict": "not_comparable", "reason": "no certificate was kept of its first step"}
    else:
        found = {"verdict": "not_comparable", "reason": "no step was made after it"}
    return Certificate(
        attempt=str(resumed["attempt"]),
        checkpoint=str(resumed["checkpoint"]),
        step=int(resumed["step"]),
        tokens=resumed.get("tokens"),
        made_by=resumed.get("made_by"),
        layout=resumed.get("layout"),
        ranks=resumed.get("world_size"),
        samples=samples and {key: samples[key] for key in ("count", "ids", "digest")},
        **found,
    )
