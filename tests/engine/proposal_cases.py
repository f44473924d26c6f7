"""What the ranks of test_proposals do: a step of every proposed layout, with one recompute mode each, in turn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hpcmoe.config.schema import Config, DataConfig, LoggingConfig
from hpcmoe.engine.trainer import Trainer
from hpcmoe.planner.layout import Layout
from tests.engine.parity_cases import own_world, trainer_of
from tests.planner.proposals import NAMES, config_for, proposals

BATCH = {1: 8, 2: 16, 3: 24, 4: 32}  # sequences by nodes: enough for pipelines, few enough for two cores
SEQ = 16
SAME_LOSS = 1e-5
SAME_NORM = 1e-3  # relative; balancing losses are of microbatches, whose sizes differ


def chosen(nodes: int, every: int) -> list[Layout]:
    """One layout for all its microbatch sizes and recompute modes, each mode in its turn; of these one in ``every``."""
    groups = defaultdict(list)
    for layout in proposals(config_of(nodes)):
        groups[replace(layout, microbatch=1, recompute="none")].append(layout)
    return [group[number % len(group)] for number, group in enumerate(groups.values())][::every]


def config_of(nodes: int) -> Config:
    return config_for(nodes, f"train.seq_len={SEQ}", f"train.global_batch_tokens={BATCH[nodes] * SEQ}", "model.aux_loss_coef=0")


def evaluate(trainer: Trainer) -> float:
    """Mean cross entropy of the first samples, after the step."""
    sizes, loader = trainer.sizes, trainer.loader
    batches = loader.microbatches(0, sizes.global_batch, trainer.data_rank, sizes.data_ranks, sizes.microbatch)
    loss_sum, tokens = trainer.compute.evaluate(list(batches))
    both = torch.stack((loss_sum, torch.tensor(float(tokens), dtype=torch.float64)))
    dist.all_reduce(both)
    return float(both[0] / both[1])


def each_proposal_trains(text: Path, scratch: Path, nodes: int, every: int) -> None:
    losses, norms = {}, {}
    for number, layout in enumerate(chosen(nodes, every)):
        config = config_of(nodes)
        config.data, config.logging = DataConfig(source="text", path=str(text)), LoggingConfig(tensorboard=False)
        for name in NAMES:
            setattr(config.layout, name, getattr(layout, name))
        with own_world(str(number)):
            trainer = trainer_of(config, scratch / str(number))
            agreed = trainer.train_step()
            evaluated = evaluate(trainer)
        losses[layout], norms[layout] = (agreed.loss, evaluated), agreed.grad_norm
        if dist.get_rank() == 0:
            print(layout, agreed.loss, evaluated, agreed.grad_norm, flush=True)
    first = next(iter(losses))
    assert len(losses) > 20 // every
    for wanted, seen in zip(losses[first], zip(*losses.values(), strict=True), strict=True):
        assert not {layout: loss for layout, loss in zip(losses, seen, strict=True) if abs(loss - wanted) > SAME_LOSS}
    assert not {layout: norm for layout, norm in norms.items() if abs(norm / norms[first] - 1) > SAME_NORM}
