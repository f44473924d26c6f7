"""What the planner puts on a pipeline rank is what the engine puts there."""

from __future__ import annotations

import pytest

from hpcmoe.config.compose import load
from hpcmoe.models.partition import SCHEDULES, chunks, split, stages_of_rank
from hpcmoe.planner.layout import Layout, stage_chunks
from hpcmoe.planner.memory import Memories
from hpcmoe.planner.params import model_params
from hpcmoe.planner.shapes import from_config
from hpcmoe.planner.stages import contents, telling
from hpcmoe.planner.workload import Workload
from hpcmoe.resources import resource_dir

MODELS = sorted(path.stem for path in (resource_dir("conf") / "model").glob("*.yaml"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_holds_the_layers_of_the_engines_split(name: str, schedule: str) -> None:
    model = load([f"model={name}"]).model
    pp, shape = 2, from_config(model)
    layers = split(model, 4096, pp * chunks(schedule))
    layout = Layout(pp=pp, schedule=schedule, vstages=stage_chunks(schedule, pp))
    ranks = contents(shape, layout, 4096, even=False)
    for rank, held in enumerate(ranks):
        stages = stages_of_rank(schedule, pp, rank)
        assert [c.dense + c.moe for c in held] == [len(layers[stage]) for stage in stages]
        assert [c.dense for c in held] == [sum(i < model.first_dense_layers for i in layers[stage]) for stage in stages]
        assert [c.first for c in held] == [stage == 0 for stage in stages]
        assert [c.last for c in held] == [stage == len(layers) - 1 for stage in stages]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ranks_together_hold_the_model_once(schedule: str) -> None:
    shape = from_config(load(["model=deepseek_v3"]).model)
    layout = Layout(pp=4, dp_shard=8, ep=8, schedule=schedule, vstages=stage_chunks(schedule, 4))
    memories = Memories(shape, Workload(seq=4096, batch=64))
    held = [memories.held_on(layout, rank) for rank in range(4)]
    assert sum(part.dense + layout.ep * part.expert for part in held) == model_params(shape).total


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_fullest_rank_is_among_those_that_are_looked_at(schedule: str) -> None:
    shape = from_config(load(["model=mixtral_8x7b"]).model)
    layout = Layout(pp=8, dp_shard=4, ep=4, schedule=schedule, vstages=stage_chunks(schedule, 8))
    memories = Memories(shape, Workload(seq=4096, batch=128))
    everywhere = max(memories.on_rank(layout, 32, rank).total for rank in range(8))
    assert memories.fullest(layout, 32).total == everywhere
    assert len(telling(memories.contents(layout))) < 8
