"""The certificate of a resume: which samples come next, and whether the first step gives the bits that were given before.

Rank 0 only. Together with the journal's `resumed` line it says from what, and how well, an attempt continued. Changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.callback import NOTHING, Callback, Told
from hpcmoe.engine.callbacks.skip import finite
from hpcmoe.engine.restore import COMPUTED_WITH, computed_with
from hpcmoe.runs.journal import Event, Journal, parse_json_lines, read_journal

MOST_IDS = 64  # are written out; the digest covers all


@dataclass(frozen=True)
class OnRecord:
    """The figures that an earlier attempt had for a step."""

    attempt: str
    loss: float | None  # null in metrics.jsonl: not finite
    grad_norm: float | None


class Certificate(Callback):
    """``next_ids``: the sequences of the corpus that the coming step trains on, of all ranks, in order."""

    name = "certificate"

    def __init__(self, journal: Journal, metrics: Path, deterministic: bool, next_ids: Callable[[], list[int]]) -> None:
        self.journal, self.metrics, self.deterministic, self.next_ids = journal, metrics, deterministic, next_ids
        self._resumed: Event | None = None
        self._record: OnRecord | str | None = None  # what to compare with, or why there is nothing; None: nothing to certify

    def before_training(self, step: int) -> Told:
        events = read_journal(self.journal.path)
        own = [event for event in events if event["event"] == "resumed" and event["attempt"] == self.journal.attempt]
        self._resumed = own[-1] if own else None
        ids = self.next_ids()
        digest = blake2b(",".join(map(str, ids)).encode(), digest_size=16).hexdigest()
        self.journal.append("next_samples", step=step + 1, count=len(ids), ids=ids[:MOST_IDS], digest=digest)
        if self._resumed is not None:
            self._record = on_record(self._resumed, events, lines_of_step(self.metrics, step + 1))
        return NOTHING

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        if self._resumed is None or self._record is None:
            return NOTHING
        record, self._record = self._record, None
        self._certify(step, finite(agreed.loss), finite(agreed.grad_norm), record)
        return NOTHING

    def _certify(self, step: int, loss: float | None, norm: float | None, record: OnRecord | str) -> None:
        assert self._resumed is not None
        verdict, reason = judge(loss, norm, record, self.deterministic)
        before = {} if isinstance(record, str) else {"before": vars(record)}
        name = self._resumed["checkpoint"]
        self.journal.append(
            "certified", checkpoint=name, step=step, loss=loss, grad_norm=norm, verdict=verdict, reason=reason, **before
        )
        if verdict == "differs":
            print(f"RESUME DIFFERS: step {step} after {name}: {reason}", file=sys.stderr, flush=True)
        else:
            print(
                f"resume   from {name}: step {step} is {verdict.replace('_', ' ')}{f': {reason}' if reason else ''}", flush=True
            )


def judge(loss: float | None, norm: float | None, record: OnRecord | str, deterministic: bool) -> tuple[str, str | None]:
    """(identical | differs | not_comparable, why). Figures are compared bit by bit; those not finite have no bits on record."""
    if isinstance(record, str):
        return "not_comparable", record
    if None in (loss, norm, record.loss, record.grad_norm):
        return "not_comparable", "figures that are not finite are not on record"
    if (loss, norm) == (record.loss, record.grad_norm):
        return "identical", None
    values = f"loss {loss!r} now, {record.loss!r} in attempt {record.attempt}; gradient norm {norm!r}, {record.grad_norm!r}"
    if not deterministic:
        return "not_comparable", f"train.deterministic is false; {values}"
    return "differs", values


def on_record(resumed: Event, events: Iterable[Event], lines: Iterable[dict[str, Any]]) -> OnRecord | str:
    """Whose figures for the next step must be met bit for bit, or why nobody's.

    Those of the attempt that made the checkpoint, or of one that continued from it before; only where it computed alike.
    """
    step, maker = int(resumed["step"]) + 1, resumed.get("made_by")
    if maker is None:
        return f"{resumed['checkpoint']} does not say which attempt made it"
    computed = {maker: resumed.get("made_with", {})}
    for event in events:
        same = event.get("checkpoint") == resumed["checkpoint"] and event.get("made_by") == maker
        if event["event"] == "resumed" and same and event["attempt"] != resumed["attempt"]:
            computed[event["attempt"]] = computed_with(event)
    found = {line["attempt"]: line for line in lines if line["attempt"] in computed}
    if not found:
        return f"step {step} had not been done after this checkpoint before"
    here = computed_with(resumed)
    alike = [name for name in found if computed[name] == here]
    if not alike:
        before = computed[list(found)[-1]]
        changed = [
            f"{key} {before.get(key)} then, {here.get(key)} now" for key in COMPUTED_WITH if before.get(key) != here.get(key)
        ]
        return "computed otherwise before: " + "; ".join(changed)
    line = found[alike[-1]]
    return OnRecord(alike[-1], line["loss"], line["grad_norm"])


def lines_of_step(metrics: Path, step: int) -> list[dict[str, Any]]:
    """Every attempt's line of ``step``. A long run's file is large: only lines that may be meant are kept and read as JSON."""
    wanted = f'"step": {step},'.encode()
    try:
        with metrics.open("rb") as file:
            lines = parse_json_lines([line for line in file if wanted in line])
    except FileNotFoundError:
        return []
    return [line for line in lines if line.get("step") == step and {"attempt", "loss", "grad_norm"} <= line.keys()]
