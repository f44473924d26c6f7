"""The attempts of a run, told from its journal and metrics."""

from typing import Any

import pytest

from hpcmoe.runs.story import attempts_of, goodput_of, last_sign_of_life


def event(t: float, name: str, attempt: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": name, "attempt": attempt, **fields}


def started(t: float, attempt: str, gpus: int = 8) -> dict[str, Any]:
    job, restart = attempt.rsplit(".", 1)
    return event(t, "attempt_started", attempt, job_id=job, restart=int(restart), gpus=gpus, nodes=2, hosts=["n1", "n2"])


def steps(attempt: str, first: int, last: int, t: float = 0.0) -> list[dict[str, Any]]:
    return [{"attempt": attempt, "step": step, "t": t + step} for step in range(first, last + 1)]


PREEMPTED_THEN_KILLED = [
    event(0, "planned", run_id="abc"),
    event(1, "submitted", job_id="7"),
    started(100, "7.0"),
    event(110, "first_step", "7.0", step=1, startup={"imports": 3.0}),
    event(150, "checkpoint_saved", "7.0", step=30),
    event(150, "left", "7.0", step=30, verdict="leave", save_s=1.5),
    event(151, "attempt_ended", "7.0", cause="preempted"),
    started(200, "7.1"),
    event(209, "resumed", "7.1", step=30),
    event(210, "first_step", "7.1", step=31),
    event(220, "checkpoint_saved", "7.1", step=40),
    started(300, "7.2"),
    event(300, "attempt_ended", "7.1", cause="node_failure", ended=260.0),
    event(309, "resumed", "7.2", step=40),
    event(310, "first_step", "7.2", step=41),
]
METRICS = steps("7.0", 1, 30) + steps("7.1", 31, 47) + steps("7.2", 41, 50)


def test_each_attempt_has_its_steps_causes_and_losses() -> None:
    first, second, third = attempts_of(PREEMPTED_THEN_KILLED, METRICS)
    assert (first.cause, first.first_step, first.last_step, first.steps_lost, first.save_s) == ("preempted", 1, 30, 0, 1.5)
    assert (second.cause, second.resumed_from, second.last_step, second.steps_lost) == ("node_failure", 30, 47, 7)
    assert third.open
    assert third.steps_lost is None
    assert second.restart_s == pytest.approx(210 - 151)


def test_gpu_hours_count_every_attempt_and_the_running_one_up_to_now() -> None:
    first, second, third = attempts_of(PREEMPTED_THEN_KILLED, METRICS)
    assert first.gpu_hours(now=1e9) == pytest.approx(8 * 51 / 3600)
    assert second.gpu_hours(now=1e9) == pytest.approx(8 * 60 / 3600)
    assert third.gpu_hours(now=400) == pytest.approx(8 * 100 / 3600)


def test_steps_after_the_newest_checkpoint_are_lost_when_nobody_continued_yet() -> None:
    events = [started(0, "7.0"), event(5, "checkpoint_saved", "7.0", step=10), event(9, "attempt_ended", "7.0", cause="crashed")]
    (only,) = attempts_of(events, steps("7.0", 1, 13))
    assert only.steps_lost == 3


def test_steps_whose_lines_a_full_disk_kept_out_are_counted_by_the_signs_of_life() -> None:
    events = [
        started(0, "7.0"),
        event(1, "first_step", "7.0", step=1),
        event(5, "checkpoint_saved", "7.0", step=20),
        event(9, "attempt_ended", "7.0", cause="crashed", last_step=61),
        started(10, "7.1"),
        event(11, "resumed", "7.1", step=20),
        event(19, "attempt_ended", "7.1", cause="crashed", last_step=20),
    ]
    metrics = steps("7.0", 1, 25)
    first, second = attempts_of(events, metrics)
    assert (first.first_step, first.last_step, first.steps_lost, first.steps_unwritten) == (1, 61, 41, 36)
    assert (second.last_step, second.steps_lost, second.steps_unwritten) == (None, 0, 0), "it had made none"
    goodput = goodput_of([first, second], [line | {"seconds": 1.0} for line in metrics], 20.0)
    assert (goodput.useful_steps, goodput.all_steps) == (25, 61)


def test_an_attempt_that_made_no_step_lost_none() -> None:
    (only,) = attempts_of([started(0, "7.0"), event(9, "attempt_ended", "7.0", cause="crashed")], [])
    assert (only.first_step, only.steps_lost) == (None, 0)


def test_a_next_attempt_that_is_still_loading_does_not_make_everything_look_lost() -> None:
    events = [
        started(0, "7.0"),
        event(5, "checkpoint_saved", "7.0", step=20),
        event(6, "attempt_ended", "7.0", cause="preempted"),
        started(9, "7.1"),
    ]
    first, _ = attempts_of(events, steps("7.0", 1, 20))
    assert first.steps_lost == 0


def test_start_up_is_told_by_part_from_the_job_scripts_arrival_to_the_first_step() -> None:
    parts = {"imports": 4.0, "rendezvous": 1.5, "load": 0.25, "first_step": 0.5}
    events = [started(100, "7.0"), event(108.0, "first_step", "7.0", step=1, startup=parts), started(200, "7.1")]
    first, second = attempts_of(events, [])
    assert list(first.startup.items()) == [("launch", 1.75), *parts.items()]
    assert sum(first.startup.values()) == 108.0 - 100
    assert second.startup == {}
    assert first.as_json(now=300)["startup"] == first.startup


def test_a_clock_that_was_set_back_makes_no_negative_launch() -> None:
    events = [started(100, "7.0"), event(101.0, "first_step", "7.0", step=1, startup={"imports": 4.0})]
    assert attempts_of(events, [])[0].startup == {"launch": 0.0, "imports": 4.0}


def test_the_last_sign_of_life_is_the_newest_line_anywhere() -> None:
    assert last_sign_of_life("7.1", PREEMPTED_THEN_KILLED, METRICS) == 300
    assert last_sign_of_life("9.9", PREEMPTED_THEN_KILLED, METRICS) is None


def timed(attempt: str, first: int, last: int, seconds: float) -> list[dict[str, Any]]:
    return [{"attempt": attempt, "step": step, "t": 0.0, "seconds": seconds} for step in range(first, last + 1)]


def test_goodput_counts_each_step_once_and_of_the_time_that_which_it_took() -> None:
    metrics = timed("7.0", 1, 30, 1.0) + timed("7.1", 31, 47, 1.0) + timed("7.2", 41, 50, 2.0)
    found = goodput_of(attempts_of(PREEMPTED_THEN_KILLED, metrics), metrics, now=400)
    assert (found.useful_steps, found.all_steps, found.useful_s) == (50, 57, 40 + 10 * 2)
    assert (found.held_s, found.wall_s) == (51 + 60 + 100, 300)
    assert found.as_json()["of_steps"] == pytest.approx(50 / 57)
    assert found.of_held == pytest.approx(60 / 211)
    assert found.of_wall == pytest.approx(60 / 300)


def test_steps_that_the_next_attempt_has_not_done_again_yet_are_not_useful() -> None:
    metrics = timed("7.0", 1, 30, 1.0) + timed("7.1", 21, 23, 1.0)
    assert goodput_of([], metrics, now=0).useful_steps == 23


def test_what_the_last_attempt_lost_is_not_useful_once_it_has_ended() -> None:
    events = [started(0, "7.0"), event(5, "checkpoint_saved", "7.0", step=10), event(20, "attempt_ended", "7.0", cause="crashed")]
    metrics = timed("7.0", 1, 13, 1.0)
    found = goodput_of(attempts_of(events, metrics), metrics, now=1e6)
    assert (found.useful_steps, found.all_steps, found.wall_s) == (10, 13, 20)


def test_a_run_without_steps_has_no_goodput() -> None:
    found = goodput_of([], [], now=5)
    assert (found.of_steps, found.of_held, found.of_wall) == (None, None, None)
