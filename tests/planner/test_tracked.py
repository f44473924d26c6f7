"""The bytes of --verify's fake build against those that real gloo ranks allocate in a training step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.memory import Memories
from hpcmoe.planner.pipeline import in_flight_by_chunk
from hpcmoe.planner.plan import workload
from hpcmoe.planner.shapes import from_config
from tests.engine.ranks import run_together

MICROBATCHES, SEQUENCES = 4, 4
CASES = {
    "experts over all ranks": Layout(dp_shard=4, ep=4, microbatch=SEQUENCES),
    "tensor parallel, selective recompute": Layout(dp_shard=2, tp=2, ep=4, microbatch=SEQUENCES, recompute="selective"),
    "two stages, full recompute": Layout(pp=2, dp_shard=2, ep=2, microbatch=SEQUENCES, recompute="full"),
    "two stages, all forward passes first": Layout(pp=2, dp_shard=2, ep=2, microbatch=SEQUENCES, schedule="GPipe"),
    "stages, tensors and experts": Layout(pp=2, tp=2, ep=2, microbatch=SEQUENCES),
}


def config_of(layout: Layout) -> Config:
    """Every token goes to every expert: routing is balanced without being forced."""
    words = ["model.experts=4", "model.top_k=4", "precision=fp32", "train.seq_len=128", "layout.ep_placement=inside"]
    tokens = 128 * SEQUENCES * MICROBATCHES * layout.dp
    config = load([*words, f"train.global_batch_tokens={tokens}"])
    sizes = {
        name: getattr(layout, name)
        for name in ("pp", "dp_replicate", "dp_shard", "tp", "ep", "microbatch", "recompute", "schedule")
    }
    return replace(config, layout=replace(config.layout, **sizes))


def _step(case: str, folder: Path) -> None:
    """On a rank: train a step and write down the most bytes that were alive in it."""
    import torch
    import torch.distributed as dist

    from hpcmoe.engine.build import build
    from hpcmoe.engine.optimizer import named_moments
    from hpcmoe.engine.support import check_engine
    from hpcmoe.planner.ledger import Ledger

    config = config_of(CASES[case])
    with Ledger() as ledger:
        built = build(config, check_engine(config), torch.device("cpu"))
        named_moments(built.stages.named_parameters(), built.optimizer)
        tokens = torch.randint(0, 257, (MICROBATCHES, SEQUENCES, 129))
        batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
        ledger.restart()
        built.compute.train(batches, config.train.global_batch_tokens)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(ledger.peak))


@pytest.mark.parametrize("case", list(CASES))
def test_fake_and_real_ranks_hold_the_same_bytes(case: str, tmp_path: Path) -> None:
    from hpcmoe.planner.built import measure

    layout = CASES[case]
    config = config_of(layout)
    run_together(4, tmp_path, _step, case, tmp_path)
    work: Any = replace(workload(config), imbalance=False)
    memories = Memories(from_config(config.model), work, slack=0.0)
    for pp_rank in range(layout.pp):
        real = json.loads((tmp_path / f"{pp_rank * 4 // layout.pp}.json").read_text())
        flight = in_flight_by_chunk(layout, MICROBATCHES, pp_rank)
        received = memories.received(layout, MICROBATCHES, pp_rank)  # a pipeline's transfers are not in the fake build
        fake = measure(config, layout, work.batch, pp_rank, flight).peak + received
        assert fake == pytest.approx(real, rel=0.02), (pp_rank, fake, real)
        assert memories.on_rank(layout, MICROBATCHES, pp_rank).total == pytest.approx(real, rel=0.05), pp_rank
