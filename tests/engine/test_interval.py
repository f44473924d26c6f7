"""When a run saves, and when it leaves before its job's end: from measured times, on given clocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from hpcmoe.config.schema import CheckpointConfig
from hpcmoe.engine.checkpoint import Checkpointer
from hpcmoe.engine.interval import SavePlan, choose, end_of_job, measured_saves, retry_s, young_daly_s
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.lead import MEASURED, need_s
from hpcmoe.runs.mtbf import NODE_MTBF_S, Mtbf, mtbf_of
from hpcmoe.runs.story import Attempt


def attempt(hours: float, cause: str | None, left: bool, first_step: int | None = 1) -> Attempt:
    return Attempt("7.0", "7", 0, 0.0, 3600.0 * hours, cause=cause, left=left, first_step=first_step)


@pytest.mark.parametrize(
    ("attempts", "hours", "failures"),
    [
        ([], NODE_MTBF_S / 3600 / 4, 0),
        ([attempt(5, "preempted", left=True), attempt(4, "time_limit", left=True)], NODE_MTBF_S / 3600 / 4, 0),
        ([attempt(5, "crashed", left=False), attempt(4, "time_limit", left=True), attempt(3, None, left=False)], 12, 1),
        ([attempt(5, "node_failure", left=False), attempt(3, "preempted", left=False)], 4, 2),
        ([attempt(5, "cancelled", left=False), attempt(1, "failed", left=False)], NODE_MTBF_S / 3600 / 4, 0),
        ([attempt(5, "preempted", left=True), attempt(1, "crashed", left=False, first_step=None)], NODE_MTBF_S / 3600 / 4, 0),
    ],
)
def test_only_endings_that_cost_work_count_as_failures(attempts: list[Attempt], hours: float, failures: int) -> None:
    found = mtbf_of(attempts, nodes=4, now=3600.0 * 3)
    assert (found.seconds / 3600, found.failures) == (pytest.approx(hours), failures)
    assert ("assumed" in found.source) == (failures == 0)


def test_a_clock_that_was_set_back_gives_no_negative_time_between_failures() -> None:
    back = Attempt("7.0", "7", 0, 1000.0, 10.0, cause="crashed", first_step=1)
    assert mtbf_of([back], nodes=1, now=0.0).seconds == NODE_MTBF_S, "no time was held, as far as is known"


def test_the_interval_is_young_and_dalys_within_its_bounds() -> None:
    day = Mtbf(86400.0, 1, 86400.0, 2)
    assert young_daly_s(20.0, 86400.0) == pytest.approx(1859, abs=1)
    free = choose(20.0, 2.5, day, None)
    assert (free.steps, free.bound) == (743, None)
    assert choose(20.0, 2.5, day, 600.0).steps == 240
    assert "max_interval_s" in choose(20.0, 2.5, day, 600.0).why
    often = choose(20.0, 2.5, Mtbf(30.0, 9, 270.0, 2), 600.0)
    assert often.steps * 2.5 == 40.0, "saving takes no more than half of the time"
    assert choose(20.0, 5000.0, day, 600.0).steps == 1


@dataclass
class Machine:
    """A checkpointer and clocks whose answers the test gives."""

    folder: Path
    time: float = 1000.0
    save_seconds: list[float] = field(default_factory=list)
    flying: bool = False
    failed_in_a_row: int = 0
    full_until: float = 0.0  # saves that begin before then fail

    def in_flight(self) -> bool:
        return self.flying

    def plan(self, config: CheckpointConfig, step: int = 0, **more: Any) -> SavePlan:
        journal = Journal(self.folder / "events.jsonl", "7.0")
        values: dict[str, Any] = {"attempts": [], "nodes": 1, "stop_lead_s": 120.0} | more
        checkpointer = cast(Checkpointer, self)
        clocks: dict[str, Any] = {"clock": lambda: self.time, "now": lambda: self.time}
        return SavePlan(config, checkpointer, journal, step=step, **values, **clocks)

    def train(self, plan: SavePlan, first: int, last: int, seconds: float, save_s: float = 4.0) -> list[int]:
        """Steps that were followed by a save."""
        saved = []
        for step in range(first, last + 1):
            self.time += seconds
            if plan.due(step):
                saved.append(step)
                plan.started(step)
                if self.time < self.full_until:
                    self.failed_in_a_row += 1
                else:
                    self.failed_in_a_row = 0
                    self.save_seconds.append(save_s)
            plan.done(seconds)
        return saved

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_journal(self.folder / "events.jsonl") if event["event"] == name]


def test_an_interval_in_steps_is_kept_and_zero_means_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.train(machine.plan(CheckpointConfig(interval=4), 5), 6, 20, 1.0) == [8, 12, 16, 20]
    assert machine.train(machine.plan(CheckpointConfig(interval=0)), 1, 20, 1e6) == []
    assert not machine.events("interval_chosen")


def test_no_two_saves_are_further_apart_than_the_bound_in_seconds(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    plan = machine.plan(CheckpointConfig(interval=1000, max_interval_s=60.0))
    assert machine.train(plan, 1, 20, 10.0) == [6, 12, 18]
    assert machine.train(plan, 21, 30, 100.0) == list(range(21, 31))


def test_a_chosen_interval_is_measured_once_then_kept_and_told_with_its_reason(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    earlier = [attempt(1, "crashed", left=False)]
    plan = machine.plan(CheckpointConfig(interval=None), attempts=earlier)
    # after 60 s to measure, then every sqrt(2 x 4 s x 3600 s) = 169 s
    assert machine.train(plan, 1, 600, 1.0) == [60, 229, 398, 567]
    (chosen,) = machine.events("interval_chosen")
    assert (chosen["steps"], chosen["save_s"], chosen["step_s"], chosen["failures"]) == (169, 4.0, 1.0, 1)
    assert chosen["why"] == "Young/Daly: 4 s a save, 1 s a step, 60 min between failures (1 without warning in 60 min)"


def test_a_resumed_attempt_uses_what_the_ones_before_measured(tmp_path: Path) -> None:
    machine = Machine(tmp_path, save_seconds=[4.0])
    plan = machine.plan(CheckpointConfig(interval=None), step=100, attempts=[attempt(1, "crashed", left=False)])
    assert machine.train(plan, 101, 400, 1.0) == [269]


def test_a_choice_is_told_again_only_when_it_changes_much(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    plan = machine.plan(CheckpointConfig(interval=None, max_interval_s=None), attempts=[attempt(1, "crashed", left=False)])
    machine.train(plan, 1, 1000, 1.0, save_s=4.0)
    machine.train(plan, 1001, 2000, 1.0, save_s=4.4)
    assert len(machine.events("interval_chosen")) == 1
    machine.train(plan, 2001, 6000, 1.0, save_s=16.0)
    assert [event["save_s"] for event in machine.events("interval_chosen")][1:] == [16.0]


def test_training_never_waits_for_a_slow_save_to_begin_the_next(tmp_path: Path) -> None:
    machine = Machine(tmp_path, save_seconds=[4.0], flying=True)
    plan = machine.plan(CheckpointConfig(interval=None, max_interval_s=60.0))
    assert machine.train(plan, 1, 100, 10.0) == []


def test_a_save_that_failed_is_tried_again_long_before_the_next_interval(tmp_path: Path) -> None:
    machine = Machine(tmp_path, full_until=1000.0 + 1150)
    plan = machine.plan(CheckpointConfig(interval=1000, max_interval_s=None))
    # 30 s after the first, then twice as long each time; each save is seen to have failed one step of 1 s later
    assert machine.train(plan, 1, 2100, 1.0) == [1000, 1031, 1092, 1213, 2000]


def test_a_disk_that_stays_full_costs_training_little(tmp_path: Path) -> None:
    machine = Machine(tmp_path, full_until=1e9)
    plan = machine.plan(CheckpointConfig(interval=10_000, max_interval_s=None))
    tries = machine.train(plan, 1, 30_000, 1.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert max(gaps) <= 601
    assert len(tries) < 40
    assert retry_s(took_s=50.0, failed_in_a_row=1) == 500.0, "a save that fails slowly holds training longer"


def test_a_save_that_was_asked_for_is_tried_again_where_the_run_makes_no_others(tmp_path: Path) -> None:
    machine = Machine(tmp_path, failed_in_a_row=1)
    assert machine.train(machine.plan(CheckpointConfig(interval=0)), 1, 100, 1.0) == [31]


def first_leaving(machine: Machine, plan: SavePlan, steps: int, seconds: float) -> int | None:
    """The first step that must be the last."""
    for step in range(1, steps + 1):
        machine.time += seconds
        if plan.leaving():
            return step
        plan.done(seconds)
    return None


def test_a_run_leaves_by_itself_when_another_step_and_a_save_no_longer_fit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, save_seconds=[100.0])
    plan = machine.plan(CheckpointConfig(interval=0), end=machine.time + 1000.0, stop_lead_s=30.0)
    assert need_s(10.0, 100.0) == 275.0
    assert first_leaving(machine, plan, 100, 10.0) == 73, "270 s before the end; 10 s earlier a step more did fit"
    warned = machine.plan(CheckpointConfig(interval=0), end=machine.time + 1000.0, stop_lead_s=275.0)
    assert first_leaving(machine, warned, 100, 10.0) is None, "Slurm's own warning comes early enough"


def test_it_stays_where_the_end_or_its_own_times_are_not_known(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    never_saved = machine.plan(CheckpointConfig(interval=0), end=machine.time + 500.0)
    assert first_leaving(machine, never_saved, 100, 10.0) is None
    machine.save_seconds.append(100.0)
    assert first_leaving(machine, machine.plan(CheckpointConfig(interval=0)), 100, 10.0) is None


def test_an_end_that_lies_in_the_past_is_a_clocks_error_and_not_the_jobs_end(tmp_path: Path) -> None:
    machine = Machine(tmp_path, save_seconds=[1.0])
    assert first_leaving(machine, machine.plan(CheckpointConfig(interval=0), end=machine.time - 3600.0), 100, 10.0) is None


@pytest.mark.parametrize(("end", "cure"), [(None, "raise resilience.stop_lead_s"), (1e6, "it leaves by itself in time")])
def test_a_warning_before_the_limit_that_comes_too_late_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: float | None, cure: str
) -> None:
    machine = Machine(tmp_path, save_seconds=[100.0])
    machine.train(machine.plan(CheckpointConfig(interval=3), end=end), 1, 20, 10.0, save_s=200.0)
    (told,) = machine.events("lead_too_short")
    assert (told["need_s"], told["stop_lead_s"], told["by_itself"]) == (275.0, 120.0, end is not None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: a step (10.0 s) and a save (100.0 s) need 275 s before the job's end")
    assert cure in line


def test_a_warning_that_comes_early_enough_is_no_matter(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.train(machine.plan(CheckpointConfig(interval=3)), 1, 20, 10.0)
    assert not machine.events("lead_too_short")


def test_save_times_and_the_jobs_end_come_from_the_journal() -> None:
    events: list[dict[str, Any]] = [
        {"event": "attempt_started", "attempt": "7.0", "t": 0.0, "end_time": 50.0},
        *({"event": "checkpoint_saved", "attempt": "7.0", "t": 1.0, "seconds": float(seconds)} for seconds in range(8)),
        {"event": "attempt_started", "attempt": "7.1", "t": 60.0, "end_time": 1e9},
        {"event": "attempt_started", "attempt": "7.2", "t": 60.0},
    ]
    assert measured_saves(events) == [3, 4, 5, 6, 7]
    assert [end_of_job(events, name) for name in ("7.0", "7.1", "7.2", "8.0")] == [50.0, 1e9, None, None]


def test_what_leaving_takes_is_told_for_the_next_submission_when_it_has_changed(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    plan = machine.plan(CheckpointConfig(interval=1), measures_lead=True, stop_lead_s=1000.0)
    for save_s in (10.0, 10.5, 60.0, 61.0):
        machine.save_seconds.append(save_s)
        plan.done(4.0)
        plan.done(4.0)
    told = [event["need_s"] for event in read_journal(tmp_path / "events.jsonl") if event["event"] == MEASURED]
    assert told == [41.0, 166.0], "1.5 x (step and save), a save in flight, 10 s; changes below a quarter are not told"
    assert not any(event["event"] == "lead_too_short" for event in read_journal(tmp_path / "events.jsonl"))
