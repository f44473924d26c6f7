"""An elastic run on two, four and three nodes' worth of ranks: which samples each step saw, and what it learnt from them."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpcmoe.config.cluster_schema import ClusterConfig
from hpcmoe.config.schema import LayoutConfig, TrainConfig
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.settle import settle
from tests.engine.ranks import Attempt, events, make_run, run_engine, small_config, write_text

pytestmark = pytest.mark.multiprocess
STEPS, SEQUENCES = 12, 24
# Of a step's loss, relative: fp32 sums of other parts of the batch, in another order, and what 12 steps make of that.
TOLERANCE = 1e-4


def engine_that_tells_its_samples(run_dir: Path) -> None:
    """The engine; each rank writes down which samples the loader handed it in which step."""
    from hpcmoe.engine import main

    class Telling(main.Loader):
        def microbatches(self, first: int, *sizes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            self.step = first // SEQUENCES + 1
            return super().microbatches(first, *sizes)

        def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            with (run_dir / "samples").open("a") as told:
                told.write("".join(f"{self.step} {sample}\n" for sample in range(first, first + count)))
            return super().batch(first, count)

    main.Loader = Telling  # type: ignore[misc]
    run_engine(run_dir)


def elastic_run(folder: Path) -> RunDir:
    text = write_text(folder / "text")
    config = small_config(
        text,
        world=1,
        ep=1,
        steps=STEPS,
        layout=LayoutConfig(),
        cluster=ClusterConfig(name="test", scheduler="slurm", device="cpu"),
        train=TrainConfig(steps=STEPS, seq_len=32, global_batch_tokens=32 * SEQUENCES, seed=3),
    )
    config.nodes, config.min_nodes = 4, 2
    return make_run(folder / "run", config)


def train(run: RunDir, attempt: str, nodes: int, until: int) -> None:
    """One attempt on ``nodes`` nodes of a rank each, asked to leave after step ``until``."""
    settle(run, attempt, nodes)
    ranks = Attempt(run, attempt, nodes, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, engine_that_tells_its_samples)
    if until < STEPS:
        ranks.wait_for(lambda: run.metrics.exists() and f'"step": {until}, ' in run.metrics.read_text())
        ranks.signal(nodes - 1, signal.SIGUSR2)
    assert ranks.finish() == [0] * nodes, ranks.log()


def samples(run: RunDir) -> dict[int, list[int]]:
    """By step, the samples that its ranks trained on."""
    found = defaultdict(list)
    for step, sample in (map(int, line.split()) for line in (run.path / "samples").read_text().splitlines()):
        found[step].append(sample)
    return {step: sorted(found[step]) for step in sorted(found)}


def losses(run: RunDir) -> dict[int, list[float]]:
    found = defaultdict(list)
    for line in map(json.loads, run.metrics.read_text().splitlines()):
        found[line["step"]].append(line["loss"])
    return dict(found)


def test_on_two_then_four_then_three_nodes_every_sample_is_seen_once_and_in_its_step(tmp_path: Path) -> None:
    for folder in ("elastic", "unbroken"):
        (tmp_path / folder).mkdir()
    run, unbroken = elastic_run(tmp_path / "elastic"), elastic_run(tmp_path / "unbroken")
    for attempt, nodes, until in (("7.0", 2, 3), ("7.1", 4, 7), ("7.2", 3, STEPS)):
        train(run, attempt, nodes, until)
    train(unbroken, "8.0", 2, STEPS)

    assert samples(run) == samples(unbroken)
    assert samples(run) == {step: list(range((step - 1) * SEQUENCES, step * SEQUENCES)) for step in range(1, STEPS + 1)}
    assert [event["nodes"] for event in events(run, "laid_out")] == [2, 4, 3]
    assert [event["nodes_before"] for event in events(run, "laid_out")] == [None, 2, 4]
    assert {event["global_batch_tokens"] for event in events(run, "laid_out")} == {32 * SEQUENCES}

    told, expected = losses(run), losses(unbroken)
    assert {step: len(values) for step, values in told.items()} == dict.fromkeys(range(1, STEPS + 1), 1)
    for step, (loss,) in told.items():
        assert loss == pytest.approx(expected[step][0], rel=TOLERANCE), step
