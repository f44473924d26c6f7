"""What a resume is certified: the same bits, others, or not comparable and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.certificate import Certificate
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.saves import certificates_of

HERE = {"layout": "pp=1 dp_shard=2", "world_size": 2, "microbatch": 2, "torch": "2.13"}
LOSS, NORM = 2.3456789012345678, 0.1


def agreed(loss: float, norm: float = NORM) -> Agreed:
    return Agreed(loss, 256, 1.0, 0.0, norm, torch.ones(1, 4), signal=False, control_stop=False, save=False)


def resumed(attempt: str, made_by: str | None = "7.0", **changes: Any) -> dict[str, Any]:
    fields = {"step": 20, "checkpoint": "step-00000020", "tokens": 5120, "made_by": made_by, "made_with": HERE} | HERE | changes
    return {"t": 1.0, "event": "resumed", "attempt": attempt, **fields}


def certified(
    folder: Path,
    journal: list[dict[str, Any]],
    lines: list[tuple[str, int, float]],
    loss: float = LOSS,
    deterministic: bool = True,
) -> dict[str, Any]:
    """What attempt 7.2 finds in its first step."""
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in journal))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(
        "".join(json.dumps({"step": step, "loss": value, "grad_norm": NORM, "attempt": who}) + "\n" for who, step, value in lines)
    )
    callback = Certificate(Journal(folder / "events.jsonl", "7.2"), metrics, deterministic, lambda: list(range(100)))
    callback.before_training(20)
    callback.after_step(21, agreed(loss), None)
    callback.after_step(22, agreed(9.9), None)
    (found,) = [event for event in read_journal(folder / "events.jsonl") if event["event"] == "certified"]
    return found


def test_a_step_that_was_done_before_is_compared_to_the_bit(tmp_path: Path) -> None:
    found = certified(tmp_path, [resumed("7.2")], [("7.0", 20, 1.0), ("7.0", 21, LOSS)])
    assert (found["verdict"], found["before"]) == ("identical", {"attempt": "7.0", "loss": LOSS, "grad_norm": NORM})
    (one,) = certificates_of(read_journal(tmp_path / "events.jsonl"))
    assert (one.checkpoint, one.step, one.tokens, one.layout, one.ranks) == ("step-00000020", 20, 5120, HERE["layout"], 2)
    assert one.samples is not None
    assert (one.samples["count"], one.samples["ids"], len(one.samples["digest"])) == (100, list(range(64)), 32)


def test_one_bit_of_difference_is_said_aloud_with_both_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = float(torch.tensor(LOSS, dtype=torch.float64).nextafter(torch.tensor(9.0, dtype=torch.float64)))
    found = certified(tmp_path, [resumed("7.2")], [("7.0", 21, LOSS)], loss=other)
    assert (found["verdict"], found["loss"], found["before"]["loss"]) == ("differs", other, LOSS)
    error = capsys.readouterr().err
    assert error.startswith("RESUME DIFFERS: step 21 after step-00000020: loss ")
    assert repr(other) in error
    assert repr(LOSS) in error


@pytest.mark.parametrize(
    ("journal", "lines", "reason"),
    [
        ([resumed("7.2")], [("7.0", 20, 1.0)], "step 21 had not been done after this checkpoint before"),
        ([resumed("7.2", made_by=None)], [("7.0", 21, LOSS)], "step-00000020 does not say which attempt made it"),
        ([resumed("7.2", world_size=4)], [("7.0", 21, LOSS)], "computed otherwise before: world_size 2 then, 4 now"),
        ([resumed("7.2")], [("6.9", 21, LOSS)], "step 21 had not been done after this checkpoint before"),
    ],
)
def test_what_cannot_be_compared_says_why(
    tmp_path: Path, journal: list[dict[str, Any]], lines: list[tuple[str, int, float]], reason: str
) -> None:
    found = certified(tmp_path, journal, lines)
    assert (found["verdict"], found["reason"]) == ("not_comparable", reason)


def test_an_attempt_that_continued_from_the_same_checkpoint_is_a_witness_too(tmp_path: Path) -> None:
    journal = [resumed("7.1", world_size=4), resumed("7.2", world_size=4)]
    found = certified(tmp_path, journal, [("7.0", 21, 1.0), ("7.1", 21, LOSS)])
    assert (found["verdict"], found["before"]["attempt"]) == ("identical", "7.1"), "7.0 made it on another number of ranks"


def test_figures_that_need_not_repeat_are_no_difference(tmp_path: Path) -> None:
    found = certified(tmp_path, [resumed("7.2")], [("7.0", 21, 1.0)], deterministic=False)
    assert found["verdict"] == "not_comparable"
    assert found["reason"].startswith("train.deterministic is false; loss ")


def test_a_first_attempt_has_samples_but_nothing_to_certify(tmp_path: Path) -> None:
    callback = Certificate(Journal(tmp_path / "events.jsonl", "7.0"), tmp_path / "metrics.jsonl", True, lambda: [5, 3])
    callback.before_training(0)
    callback.after_step(1, agreed(LOSS), None)
    (only,) = read_journal(tmp_path / "events.jsonl")
    assert (only["event"], only["step"], only["ids"], only["count"]) == ("next_samples", 1, [5, 3], 2)


def test_a_resume_that_made_no_step_is_listed(tmp_path: Path) -> None:
    (one,) = certificates_of([resumed("7.1")])
    assert (one.verdict, one.reason) == ("not_comparable", "no step was made after it")
