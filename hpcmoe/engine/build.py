"""From a config to this rank's share of the model and how a step goes through it. One way for training, checks and dry runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcmoe.config.schema import Config, Precision
from hpcmoe.engine.compute import Compute, OneStage, Passes
from hpcmoe.engine.mesh import Meshes, build_meshes
from hpcmoe.engine.optimizer import build_optimizer
from hpcmoe.engine.parallelize import materialize, parallelize
from hpcmoe.engine.pipeline import Pipeline
from hpcmoe.engine.stages import Stages, build_stages
from hpcmoe.engine.support import Sizes


@dataclass(frozen=True)
class Built:
    meshes: Meshes
    stages: Stages
    optimizer: torch.optim.Optimizer
    compute: Compute


def build_parts(config: Config, sizes: Sizes, device: torch.device) -> tuple[Meshes, Stages]:
    """This rank's parts of the model on the meta device, parallelized. Needs a process group; touches no memory of ``device``."""
    meshes = build_meshes(sizes, device)
    stages = build_stages(config.model, config.train.seq_len, sizes, meshes.dense["pp"].get_local_rank())
    parallelize(stages, meshes, config.precision)
    for part in stages.parts:
        part.set_recompute(config.layout.recompute)
    return meshes, stages


def passes(config: Config, sizes: Sizes, meshes: Meshes, stages: Stages, device: torch.device) -> Passes:
    """How batches go through the stages."""
    if sizes.pp == 1:
        return OneStage(stages.parts[0])
    dtype = torch.bfloat16 if config.precision.name is Precision.bf16 else torch.float32
    return Pipeline(stages, sizes.schedule, meshes.dense["pp"].get_group(), dtype, device)


def build(config: Config, sizes: Sizes, device: torch.device) -> Built:
    """Everything of the model on ``device``, with initial values."""
    meshes, stages = build_parts(config, sizes, device)
    materialize(stages, device, config.train.seed)
    optimizer = build_optimizer(stages.parameters(), config.optim, config.precision.moments)
    return Built(meshes, stages, optimizer, Compute(stages, passes(config, sizes, meshes, stages, device), device))
