"""What the ranks of test_precision do: which dtype is where, in layouts with every kind of parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcmoe.config.schema import Config, LayoutConfig, Precision, PrecisionConfig
from hpcmoe.data.corpus import load_corpus
from hpcmoe.data.loader import Loader
from hpcmoe.engine.optimizer import named_moments
from hpcmoe.engine.restore import load_newest
from hpcmoe.engine.trainer import Trainer
from hpcmoe.models import dispatch
from hpcmoe.models.router import Router
from hpcmoe.models.tensor_parallel import TensorParallel
from hpcmoe.models.transformer import Block
from hpcmoe.runs.journal import Journal, read_journal
from tests.engine.parity_cases import build, case_config, everything, whole
from tests.engine.parity_reference import SETTINGS

TP_PP = LayoutConfig(tp=2, pp=2, ep=2, dp_shard=1, microbatch=2)
TP_EP = LayoutConfig(tp=2, ep=2, dp_shard=2, microbatch=2)
SHARDED = LayoutConfig(ep=2, dp_shard=4, microbatch=1)


def start(text: Path, scratch: Path, layout: LayoutConfig, **precision: Any) -> Trainer:
    config: Config = case_config(text, layout, SETTINGS["four layers"])  # experts in both stages
    config.precision = PrecisionConfig(**precision)
    loader = Loader(load_corpus(config.data), config.train.seq_len, config.train.seed)
    return build(config, loader, scratch, None)


def losses(trainer: Trainer, steps: int = 3) -> list[float]:
    return [trainer.train_step().loss for _ in range(steps)]


def dtypes_are_where_they_belong(text: Path, scratch: Path) -> None:
    for name, layout in {"tp_pp": TP_PP, "tp_ep": TP_EP}.items():
        exact = losses(start(text, scratch / f"{name}_fp32", layout))
        near(exact, losses_in_bf16(start(text, scratch / name, layout, name=Precision.bf16), name), f"{name} in bf16")


def losses_in_bf16(trainer: Trainer, name: str) -> list[float]:
    """bf16: the stream and the collectives of activations. fp32: routing, masters, gradients, moments."""
    stream, scores, grads = set(), set(), set()
    for module in trainer.stages.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda _module, _inputs, output: stream.add(output[0].dtype))
        if isinstance(module, Router):
            module.register_forward_hook(lambda _module, _inputs, output: scores.update({o.dtype for o in output[1:]}))
    update = trainer.optimizer.step

    def step_and_look() -> None:
        grads.update({p.grad.dtype for p in trainer.stages.parameters() if p.grad is not None})
        update()

    trainer.optimizer.step = step_and_look  # type: ignore[method-assign, assignment]
    with sent() as traffic:
        rounded = losses(trainer)
    assert stream == {torch.bfloat16}, f"{name}: {stream}"
    assert scores == {torch.float32}, f"{name}: {scores}"
    assert grads == {torch.float32}, f"{name}: {grads}"
    assert traffic == {torch.bfloat16}, f"{name}: {traffic}"
    assert {value.dtype for value in everything(trainer).values()} == {torch.float32}
    return rounded


@contextmanager
def sent() -> Iterator[set[torch.dtype]]:
    """Dtypes that the layers' own collectives carry, sums of a few numbers apart."""
    seen: set[torch.dtype] = set()
    places: list[tuple[Any, str, int]] = [
        (dispatch, "exchange", 0),
        (TensorParallel, "reduce_scatter", 1),
        (TensorParallel, "all_gather", 1),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]

    def noting(original: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.add(args[at].dtype)
            return original(*args)

        return call

    for (owner, name, at), (_, _, original) in zip(places, originals, strict=True):
        setattr(owner, name, noting(original, at))
    try:
        yield seen
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def near(exact: list[float], rounded: list[float], what: str) -> None:
    assert max(abs(a / b - 1) for a, b in zip(rounded, exact, strict=True)) < 0.01, f"{what}: {rounded} {exact}"


def bf16_moments_and_reductions_train_and_convert(text: Path, scratch: Path) -> None:
    exact = losses(start(text, scratch / "none", SHARDED))
    near(exact, losses(start(text, scratch / "none", SHARDED, reduce="bf16")), "reduce=bf16")
    near(exact, losses(start(text, scratch / "none", TP_EP, moments="bf16", reduce="bf16")), "both on other meshes")
    folders = {}
    for moments in ("fp32", "bf16"):
        writer = start(text, scratch / moments, SHARDED, moments=moments)
        near(exact, losses(writer), f"moments={moments}")
        writer.checkpointer.journal = Journal(scratch / "events.jsonl", "test.0") if dist.get_rank() == 0 else None
        assert writer.checkpointer.save_durably(writer.stages, writer.optimizer, writer.progress) is None
        folders[moments] = (writer, scratch / moments)
    for stored, (writer, folder) in folders.items():
        for kept in ("fp32", "bf16"):
            reader = start(text, folder, TP_EP, moments=kept)
            journal = Journal(scratch / f"{stored}_{kept}.jsonl", "test.0") if dist.get_rank() == 0 else None
            load_newest(folder, "full", {"model": "same"}, reader.stages, reader.optimizer, reader.checkpointer.group, journal)
            wanted, found = all_moments(writer), all_moments(reader)
            dtype = torch.bfloat16 if kept == "bf16" else torch.float32
            for name, value in found.items():
                assert value.dtype == dtype
                assert torch.equal(value, wanted[name].to(dtype)), f"{stored} into {kept}: {name}"
            if journal is not None:
                (resumed,) = [line for line in read_journal(journal.path) if line["event"] == "resumed"]
                words = {"fp32": "float32", "bf16": "bfloat16"}
                assert resumed.get("moments") == (None if stored == kept else f"{words[stored]} to {words[kept]}")


def all_moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    moments = named_moments(trainer.stages.named_parameters(), trainer.optimizer)
    return {f"{name}/{key}": whole(value) for name, entry in moments.items() for key, value in entry.items() if key != "step"}
