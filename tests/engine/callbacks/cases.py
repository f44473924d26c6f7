"""What the ranks of these tests do: small trainers with callbacks, disturbed on purpose, against undisturbed ones."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpcmoe.config.schema import (
    BatchWarmupConfig,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    LayoutConfig,
    LoggingConfig,
    Precision,
    PrecisionConfig,
    ProfilerConfig,
    SkipConfig,
    TrainConfig,
)
from hpcmoe.data.corpus import load_corpus
from hpcmoe.data.loader import Loader
from hpcmoe.engine.agreement import Agreed, StepSums
from hpcmoe.engine.callbacks.build import build_callbacks
from hpcmoe.engine.callbacks.callback import Callback, Evaluated, Told
from hpcmoe.engine.callbacks.evaluation import Evaluation
from hpcmoe.engine.callbacks.profiler import Profiler
from hpcmoe.engine.callbacks.straggler import Straggler
from hpcmoe.engine.interval import SavePlan
from hpcmoe.engine.optimizer import local_squared_norm
from hpcmoe.engine.pace import Pace
from hpcmoe.engine.parallelize import initial_values
from hpcmoe.engine.report import Reporter
from hpcmoe.engine.restore import load_newest
from hpcmoe.engine.rng import seed_everything
from hpcmoe.engine.schedule import batch_tokens
from hpcmoe.engine.stop import HEARD, ControlFiles
from hpcmoe.engine.trainer import Lead, Trainer
from hpcmoe.errors import UserError
from hpcmoe.models.transformer import Block
from hpcmoe.runs.journal import Journal, iter_json_lines, read_journal
from tests.engine import parity_cases
from tests.engine.parity_cases import everything
from tests.engine.ranks import small_config, small_model

SEQ, BATCH = 32, 8
PIPELINE = LayoutConfig(pp=2, dp_shard=1, ep=1, microbatch=1, schedule="1F1B")


def config_of(text: Path, steps: int, **sections: Any) -> Config:
    train = {"train": TrainConfig(steps=steps, seq_len=SEQ, global_batch_tokens=SEQ * BATCH, seed=3)}
    return small_config(text, 2, 2, steps, **(train | {"checkpoint": CheckpointConfig(interval=0)} | sections))


def trainer_of(config: Config, folder: Path) -> Trainer:
    """With the callbacks that the config asks for; journals below ``folder``."""
    held_out = config.evaluation.batches * BATCH if config.evaluation.interval else 0
    loader = Loader(load_corpus(config.data), SEQ, config.train.seed, held_out)
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "events.jsonl", "test.0") if dist.get_rank() == 0 else None
    trainer = parity_cases.build(config, loader, folder, journal)
    trainer.progress.held_out = held_out
    if journal is not None:
        reporter = Reporter(folder / "metrics.jsonl", None, 1, config.train.steps, 1, trainer.peak)
        plan = SavePlan(config.checkpoint, trainer.checkpointer, journal, [], 1, 0, 120.0)
        trainer.lead = Lead(journal, ControlFiles(folder / "control", folder / "notice"), reporter, plan)
    trainer.callbacks = [*build_callbacks(trainer, dist.get_rank(), folder), Results()]
    return trainer


class Results(Callback):
    """Keeps what the steps and evaluations gave."""

    name = "results"

    def __init__(self) -> None:
        self.steps: dict[int, tuple[float, float, int]] = {}
        self.skipped: list[int] = []
        self.evaluations: dict[int, float] = {}

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        self.steps[step] = (agreed.loss, agreed.grad_norm, agreed.tokens)
        self.skipped += [step] if skipped else []
        return Told()

    def evaluated(self, result: Evaluated) -> None:
        self.evaluations[result.step] = result.loss


def results(trainer: Trainer) -> Results:
    (found,) = [callback for callback in trainer.callbacks if isinstance(callback, Results)]
    return found


class Unchanged(Callback):
    """Asserts that a step changes the model's and the optimizer's state exactly where it is not skipped."""

    name = "unchanged"

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def before_step(self, step: int) -> None:
        self.before = {name: value.clone() for name, value in everything(self.trainer).items()}

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        now = everything(self.trainer)
        same = {name for name, value in now.items() if torch.equal(value, self.before[name])}
        assert same == (now.keys() if skipped else set()), f"step {step}, skipped: {skipped}: {sorted(same ^ now.keys())}"
        return Told()


def spoil(trainer: Trainer, by_step: dict[int, Callable[[StepSums], None]]) -> None:
    """Let this rank's figures of some steps be bad."""
    train = trainer.compute.train

    def spoilt(*args: Any) -> StepSums:
        sums = train(*args)
        by_step.get(trainer.progress.step + 1, lambda sums: None)(sums)
        return sums

    trainer.compute.train = spoilt  # type: ignore[method-assign, assignment]


def same_state(one: Trainer, other: Trainer) -> None:
    ours, theirs = everything(one), everything(other)
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    assert not different, different
    assert replace(one.progress, callbacks="") == replace(other.progress, callbacks="")


def restored(config: Config, folder: Path, step: int) -> Trainer:
    """A new trainer that continues from ``folder``'s checkpoint of ``step``."""
    copy = folder.with_name(f"{folder.name}-{step}")
    if dist.get_rank() == 0:
        shutil.copytree(folder / f"step-{step:08d}", copy / f"step-{step:08d}")
    dist.barrier()
    trainer = trainer_of(config, copy)
    found = load_newest(
        copy,
        "full",
        {"model": "same"},
        trainer.stages,
        trainer.optimizer,
        trainer.checkpointer.group,
        trainer.checkpointer.journal,
    )
    assert found is not None
    assert found.step == step
    trainer.progress, trainer.checkpointer.saved_step = found, step
    return trainer


def bad_figures_of_one_rank_are_skipped_by_all(text: Path, scratch: Path) -> None:
    rank = dist.get_rank()
    for precision in (Precision.fp32, Precision.bf16):
        model = small_model(bias_update_rate=0.01)
        trainer = trainer_of(config_of(text, 6, model=model, precision=PrecisionConfig(name=precision)), scratch / precision.name)

        def bad_gradient(sums: StepSums, trainer: Trainer = trainer) -> None:
            grad = next(p.grad for p in trainer.stages.parameters() if isinstance(p.grad, DTensor) and p.grad.to_local().numel())
            grad.to_local().view(-1)[0] = float("nan")
            sums.grad_squared = local_squared_norm(trainer.stages.parameters(), trainer.device)

        def bad_loss(sums: StepSums) -> None:
            sums.loss_sum = sums.loss_sum * float("inf")

        spoil(trainer, {2: bad_gradient, 4: bad_loss} if rank == 1 else {})
        trainer.callbacks = [*trainer.callbacks, Unchanged(trainer)]
        trainer.run()
        assert results(trainer).skipped == [2, 4]
        assert (trainer.progress.step, trainer.progress.position, trainer.progress.skipped) == (6, 6 * BATCH, 2)
        if rank == 0:
            events = [e for e in read_journal(scratch / precision.name / "events.jsonl") if e["event"] == "step_skipped"]
            assert [(e["step"], e["reason"], e["grad_norm"] is None, e["loss"] is None) for e in events] == [
                (2, "not finite", True, False),
                (4, "not finite", False, True),
            ]


def a_spike_after_a_resume_is_judged_by_the_steps_before_it(text: Path, scratch: Path) -> None:
    config = config_of(text, 9, checkpoint=CheckpointConfig(interval=5, keep_last=5))
    config.train.skip = SkipConfig(spike_sigma=6.0, window=8)

    def spike(sums: StepSums) -> None:
        sums.loss_sum = sums.loss_sum * 3.0

    whole = trainer_of(config, scratch / "whole")
    spoil(whole, {8: spike})
    whole.run()
    assert results(whole).skipped == [8]
    late = restored(config, scratch / "whole", 5)
    spoil(late, {8: spike})
    late.run()
    assert results(late).skipped == [8]
    same_state(whole, late)


def one_skipped_step_too_many_ends_the_run_everywhere(text: Path, scratch: Path) -> None:
    def bad(sums: StepSums) -> None:
        sums.loss_sum = sums.loss_sum * float("nan")

    for name, skip, steps, line in (
        ("row", SkipConfig(most_in_a_row=2), (3, 4, 5), "step 5: loss nan, gradient norm .*: not finite; .* 2 steps in a row"),
        ("window", SkipConfig(window=4, most_in_window=1), (1, 5, 6, 7), "step 6: .* 1 of the last 4 were|step 6"),
        ("none", SkipConfig(most_in_a_row=0), (2,), "step 2: "),
    ):
        config = config_of(text, 8)
        config.train.skip = skip
        trainer = trainer_of(config, scratch / name)
        spoil(trainer, dict.fromkeys(steps, bad) if dist.get_rank() == 1 else {})
        error = None
        try:
            trainer.run()
        except UserError as raised:
            error = str(raised)
        assert error is not None, name
        assert re.match(line, error), error


def evaluation_changes_nothing_and_is_right(text: Path, scratch: Path) -> None:
    evaluation = EvaluationConfig(interval=2, batches=2)
    seen: list[tuple[list[float], dict[str, torch.Tensor], Any]] = []
    for often in (2, 100):  # 100: after the last step only
        trainer = trainer_of(config_of(text, 3, evaluation=replace(evaluation, interval=often)), scratch / str(often))
        seed_everything(1, dist.get_rank())
        trainer.run()
        assert list(results(trainer).evaluations) == ([2, 3] if often == 2 else [3])
        seen.append(([random.random(), np.random.rand(), torch.rand(1).item()], everything(trainer), results(trainer).steps))
    assert seen[0][0] == seen[1][0]
    assert seen[0][2] == seen[1][2]
    assert all(torch.equal(value, seen[1][1][name]) for name, value in seen[0][1].items())

    config = config_of(text, 1, evaluation=evaluation, model=small_model(layers=4))
    first_losses = []
    for layout in (config.layout, PIPELINE, replace(PIPELINE, schedule="ZBVZeroBubble")):
        fresh = trainer_of(replace(config, layout=layout), scratch / f"fresh-{layout.pp}-{layout.schedule}")
        (callback,) = [callback for callback in fresh.callbacks if isinstance(callback, Evaluation)]
        told = callback.after_step(2, Agreed(0.0, 1, 0.0, 0.0, 0.0, torch.zeros(1, 1), False, False, False), None)
        assert told.evaluated is not None
        assert told.evaluated.tokens == 2 * BATCH * SEQ
        assert abs(told.evaluated.loss - held_out_loss(config, fresh.loader)) < 1e-5, layout
        first_losses.append(fresh.train_step().loss)  # passes backward again, after those that were forward only
    assert max(first_losses) - min(first_losses) < 1e-5


def held_out_loss(config: Config, loader: Loader) -> float:
    """Of a fresh model, by one process, sequence after sequence."""
    model = initial_values(config.model, config.train.seed)
    model.train(False)
    total = 0.0
    with torch.no_grad():
        for i in range(loader.held_out):
            ((inputs, targets),) = loader.held_out_microbatches(i, 1, 0, 1, 1)
            total += torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    return total / loader.held_out


def a_stop_is_heard_within_one_evaluation_batch(text: Path, scratch: Path) -> None:
    config = config_of(text, 4, evaluation=EvaluationConfig(interval=2, batches=3))
    whole = trainer_of(config, scratch / "whole")
    whole.run()
    stopped = trainer_of(config, scratch / "stopped")
    stopped.signals.install(HEARD)
    calls = signal_in_the_middle(stopped.compute, "evaluate", nth=2, rank=1)
    outcome = stopped.run()
    assert (outcome.verdict, outcome.step, outcome.source) == ("leave", 2, "signal")
    assert len(calls) == 2, "the third batch is not begun"
    assert not results(stopped).evaluations
    back = restored(config, scratch / "stopped", 2)
    assert back.run().verdict == "completed"
    assert results(back).evaluations == results(whole).evaluations, "what was cut short is done again"
    same_state(whole, back)
    if dist.get_rank() == 0:
        at = results(whole).evaluations
        assert written(scratch / "whole") == [(1, None, None), (2, 2, at[2]), (3, None, None), (4, 4, at[4])]
        assert written(scratch / "stopped-2") == [(3, 2, at[2]), (4, 4, at[4])]


def written(folder: Path) -> list[tuple[int, int | None, float | None]]:
    """Each line's step and what it says of an evaluation."""
    return [(line["step"], line["eval_step"], line["eval_loss"]) for line in iter_json_lines(folder / "metrics.jsonl")]


def signal_in_the_middle(owner: Any, method: str, nth: int, rank: int) -> list[int]:
    """The ``nth`` call of ``owner.method`` makes rank ``rank`` hear SIGTERM while it runs; the list grows with each call."""
    inner, calls = getattr(owner, method), list[int]()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        if len(calls) == nth and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*args, **kwargs)

    setattr(owner, method, wrapped)
    return calls


def a_stop_is_heard_in_the_first_step(text: Path, scratch: Path) -> None:
    trainer = trainer_of(config_of(text, 4), scratch / "first")
    trainer.signals.install(HEARD)
    calls = signal_in_the_middle(trainer.compute.passes, "train", nth=1, rank=1)
    outcome = trainer.run()
    assert (outcome.verdict, outcome.step, len(calls)) == ("leave", 1, 1)
    assert trainer.checkpointer.saved_step == 1


def a_stop_is_heard_while_a_checkpoint_is_written(text: Path, scratch: Path) -> None:
    for name, asynchronous in (("thread", True), ("waiting", False)):
        config = config_of(text, 6, checkpoint=CheckpointConfig(interval=2, keep_last=5, asynchronous=asynchronous))
        trainer = trainer_of(config, scratch / name)
        trainer.signals.install(HEARD)
        calls = signal_in_the_middle(trainer.checkpointer, "_write", nth=1, rank=0)
        outcome = trainer.run()
        assert (outcome.verdict, outcome.step) == ("leave", 3), "the step after the save that was interrupted"
        assert len(calls) == 2
        assert sorted(p.name for p in (scratch / name).glob("step-*")) == ["step-00000002", "step-00000003"]


def the_batch_grows_alike_in_every_layout_and_after_a_resume(text: Path, scratch: Path) -> None:
    config = config_of(
        text, 9, layout=LayoutConfig(ep=2, dp_shard=2, microbatch=1), checkpoint=CheckpointConfig(interval=4, keep_last=9)
    )
    config.train.batch_warmup = BatchWarmupConfig(start_tokens=2 * SEQ, tokens=640)
    whole = trainer_of(config, scratch / "whole")
    whole.run()
    tokens = [figures[2] for figures in results(whole).steps.values()]
    assert tokens == [64, 64, 64, 64, 128, 128, 192, 256, 256]
    assert whole.progress.position == sum(tokens) // SEQ
    late = restored(config, scratch / "whole", 4)
    late.run()
    same_state(whole, late)
    assert results(late).steps == {step: figures for step, figures in results(whole).steps.items() if step > 4}
    assert [batch_tokens(sum(tokens[:n]), config.train) for n in range(9)] == tokens

    pipeline = trainer_of(replace(config, layout=PIPELINE), scratch / "pipeline")
    pipeline.run()
    for step, (loss, norm, count) in results(pipeline).steps.items():
        expected = results(whole).steps[step]
        assert count == expected[2]
        assert abs(loss - expected[0]) < 1e-4, step
        assert abs(norm / expected[1] - 1) < 1e-3, step


def a_window_of_steps_is_traced(text: Path, scratch: Path) -> None:
    rank = dist.get_rank()
    config = config_of(text, 4, logging=LoggingConfig(tensorboard=False))
    config.logging.profiler = ProfilerConfig(first_step=2, steps=2, ranks=[1])
    trainer_of(config, scratch / "window").run()
    config.logging.profiler = ProfilerConfig(first_step=4, steps=5, ranks=[0])
    trainer_of(config, scratch / "cut").run()
    dist.barrier()
    (trace,) = (scratch / "window").glob("profile-*")
    assert trace.name == "profile-rank0001-steps-2-3.json.gz"
    if rank == 0:
        names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert "aten::mm" in names or "aten::bmm" in names
        assert any("gloo" in name for name in names)
        assert [path.name for path in (scratch / "cut").glob("profile-*")] == ["profile-rank0000-steps-4-4.json.gz"]
        small = Profiler(ProfilerConfig(first_step=1, steps=1, max_mb=0), scratch, 0)
        small.before_step(1)
        torch.ones(4) @ torch.ones(4)
        small.close()
        assert not list(scratch.glob("profile-*"))


def the_rank_with_slow_attention_is_told(text: Path, scratch: Path) -> None:
    """Its steps are no longer than the other's: that one waits for it in every block."""
    steps = 1 + 3 * 4
    trainer = trainer_of(config_of(text, steps), scratch / "checkpoints")
    trainer.pace = Pace(trainer.device)
    trainer.pace.watch(trainer.stages)
    if trainer.lead is not None:
        nodes = ["n0001", "n0002"]
        trainer.callbacks = [Straggler(trainer.lead.journal, nodes, "cpu", window_s=0.0, window_steps=4), *trainer.callbacks]
    else:
        for block in trainer.stages.parts[0].layers.values():
            assert isinstance(block, Block)
            once = block.attention._own_heads
            block.attention._own_heads = lambda *args, once=once: [once(*args) for _ in range(9)][-1]  # type: ignore[method-assign]
    trainer.run()
    if dist.get_rank() == 0:
        [told] = [event for event in read_journal(scratch / "checkpoints" / "events.jsonl") if event["event"] == "straggler"]
        assert (told["rank"], told["node"], told["step"]) == (1, "n0002", steps), told
        assert told["times"] > 2.0, told
