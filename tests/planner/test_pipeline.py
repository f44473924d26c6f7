"""Waiting and memory of pipeline schedules against the very orders of passes that PyTorch would run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hpcmoe.models.partition import CHUNKED, SPLIT_BACKWARD, chunks, schedule_violation, stages_of_rank
from hpcmoe.planner.layout import Layout, stage_chunks
from hpcmoe.planner.pipeline import bubble_s, in_flight, in_flight_by_chunk

CASES = [
    (schedule, pp, microbatches)
    for schedule in CHUNKED
    for pp in (2, 3, 4, 8)
    for microbatches in (pp, pp + 1, 2 * pp, 2 * pp + 2, 3 * pp, 8 * pp)
    if schedule_violation(schedule, pp, microbatches) is None
]
Pass = tuple[str, int, int]  # kind (F, B whole, I inputs' gradients, W weights'), stage, microbatch


@dataclass
class Replay:
    """``idle``: seconds beyond the work itself; ``peak``: each chunk's activations when a rank holds most, by rank."""

    idle: float
    peak: dict[int, tuple[int, ...]]


def order(schedule: str, pp: int, microbatches: int) -> dict[int, list[Pass]]:
    """What each rank does, in order, as PyTorch's schedule object plans it."""
    import torch
    from torch.distributed.pipelining.schedules import get_schedule_class

    class Stage:
        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages, self.group_size, self.group_rank = index, pp * chunks(schedule), pp, 0
            self.is_first, self.is_last = index == 0, index == self.num_stages - 1
            self.has_backward, self.device, self.submod = True, torch.device("cpu"), torch.nn.Linear(1, 1)
            self.stage_index_to_group_rank: dict[int, int] = {}

    made: Any = get_schedule_class(schedule)
    stages = [Stage(index) for index in stages_of_rank(schedule, pp, 0)]
    planned = made(stages, microbatches, loss_fn=lambda x, y: x, scale_grads=False).pipeline_order
    short = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

    def flat(actions: list[Any]) -> list[Pass]:
        out: list[Pass] = []
        for action in actions:
            if action is not None and action.sub_actions:
                out += flat(list(action.sub_actions))
            elif action is not None:
                out.append((short[action.computation_type.name], action.stage_index, action.microbatch_index))
        return out

    return {rank: flat(actions) for rank, actions in planned.items()}


def replay(schedule: str, pp: int, microbatches: int, seconds: dict[str, float]) -> Replay:
    """Run the order against the clock: a pass begins when its rank is free and its input is there."""
    passes, last = order(schedule, pp, microbatches), pp * chunks(schedule) - 1
    done: dict[Pass, float] = {}
    clock = dict.fromkeys(passes, 0.0)
    next_ = dict.fromkeys(passes, 0)
    alive = {rank: dict.fromkeys(stages_of_rank(schedule, pp, rank), 0) for rank in passes}
    peak: dict[int, tuple[int, ...]] = dict.fromkeys(passes, ())

    def inputs(kind: str, stage: int, microbatch: int) -> list[Pass]:
        if kind == "F":
            return [("F", stage - 1, microbatch)] if stage else []
        if kind == "W":
            return [("I", stage, microbatch)]
        return [("F", stage, microbatch)] + ([("I", stage + 1, microbatch)] if stage < last else [])

    while any(next_[rank] < len(passes[rank]) for rank in passes):
        before = dict(next_)
        for rank, mine in passes.items():
            while next_[rank] < len(mine) and all(needed in done for needed in inputs(*mine[next_[rank]])):
                kind, stage, microbatch = mine[next_[rank]]
                begin = max([clock[rank], *(done[needed] for needed in inputs(kind, stage, microbatch))])
                clock[rank] = begin + (seconds["I"] + seconds["W"] if kind == "B" else seconds[kind])
                done["I" if kind == "B" else kind, stage, microbatch] = clock[rank]
                alive[rank][stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
                if sum(alive[rank].values()) > sum(peak[rank]):
                    peak[rank] = tuple(alive[rank].values())
                next_[rank] += 1
        assert before != next_, "the order waits for itself"
    return Replay(max(clock.values()) - microbatches * chunks(schedule) * sum(seconds.values()), peak)


@pytest.mark.parametrize(("schedule", "pp", "microbatches"), CASES)
def test_microbatches_in_flight_are_those_of_pytorchs_order(schedule: str, pp: int, microbatches: int) -> None:
    layout = Layout(pp=pp, schedule=schedule, vstages=stage_chunks(schedule, pp))
    seen = replay(schedule, pp, microbatches, {"F": 1.0, "I": 1.0, "W": 1.0}).peak
    assert {rank: in_flight_by_chunk(layout, microbatches, rank) for rank in range(pp)} == seen


@pytest.mark.parametrize("schedule", CHUNKED)
@pytest.mark.parametrize(("weight", "within"), [(1.0, 0.01), (0.7, 0.25), (0.5, 0.25)])
def test_idle_time_is_that_of_pytorchs_order(schedule: str, weight: float, within: float) -> None:
    """A backward pass of two forward passes, of which the weights' gradients take ``weight``."""
    pp, microbatches = 4, 16
    layout = Layout(pp=pp, schedule=schedule, vstages=2)
    idle = replay(schedule, pp, microbatches, {"F": 1.0, "I": 2.0 - weight, "W": weight}).idle
    said = bubble_s(layout, 2 * 1.0, 2 * (2.0 - weight), 2 * weight)  # a microbatch goes through two chunks of a rank
    assert said == pytest.approx(idle, rel=within)


def test_only_schedules_that_split_the_backward_pass_fill_their_bubble() -> None:
    waits = {
        s: bubble_s(Layout(pp=8, schedule=s, vstages=stage_chunks(s, 8)), 1.0, 1.0, 1.0) for s in ("GPipe", "1F1B", *CHUNKED)
    }
    assert waits["GPipe"] == waits["1F1B"] == 21.0
    assert waits["Interleaved1F1B"] == waits["LoopedBFS"] == 10.5
    assert all(waits[schedule] == 3.5 for schedule in SPLIT_BACKWARD)


def test_a_zero_bubble_rank_holds_as_much_as_the_first_rank_of_a_plain_pipeline() -> None:
    for schedule in ("ZBVZeroBubble", "InterleavedZeroBubble"):
        layout = Layout(pp=8, schedule=schedule, vstages=2)
        held = [in_flight(layout, 64, rank) for rank in range(8)]
        assert held == [8.0] * 8
    assert in_flight(Layout(pp=8, schedule="1F1B"), 64, 0) == 8.0
    assert in_flight(Layout(pp=8, schedule="1F1B"), 64, 7) == 1.0
