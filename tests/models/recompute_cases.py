"""What the ranks of test_recompute do: each mode against none, bit for bit, and how often ranks talk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcmoe.config.schema import Config, LayoutConfig
from hpcmoe.data.corpus import load_corpus
from hpcmoe.data.loader import Loader
from hpcmoe.engine.build import Built, build
from hpcmoe.engine.support import check_engine
from hpcmoe.models import dispatch
from hpcmoe.models.tensor_parallel import TensorParallel
from tests.engine.parity_cases import whole
from tests.engine.parity_reference import FULL as MODEL
from tests.engine.ranks import small_config

CPU = torch.device("cpu")
LAYOUTS = {
    "ep2": LayoutConfig(ep=2, dp_shard=4, microbatch=1),
    "tp2_ep2": LayoutConfig(ep=2, dp_shard=2, tp=2, microbatch=2),
    "pp2_1F1B": LayoutConfig(ep=2, dp_shard=2, pp=2, microbatch=2),
}
MODES = {"ep2": ("selective", "full"), "tp2_ep2": ("selective", "layer", "full"), "pp2_1F1B": ("selective",)}


def every_mode_equals_none(text: Path) -> None:
    for name, layout in LAYOUTS.items():
        config = small_config(text, 4, 1, 1, model=MODEL, layout=layout)
        wanted, talk, _ = gradients(config, "none")
        for mode in MODES[name]:
            found, talked, built = gradients(config, mode)
            assert found.keys() == wanted.keys()
            for parameter, gradient in found.items():
                assert torch.equal(gradient, wanted[parameter]), f"{name}, {mode}: {parameter}"
            kept = ("all_to_all", "reduce_scatter") if mode == "selective" else ()
            for collective in kept:
                assert talked[collective] == talk[collective], f"{name}, {mode}: {collective} {talked} {talk}"
            if mode == "full" and built.stages.moe_layers():
                assert talked["all_to_all"] > talk["all_to_all"], "full pays for them twice"


def gradients(config: Config, mode: str) -> tuple[dict[str, torch.Tensor], Counter[str], Built]:
    """This rank's gradients of one step, whole, and how many collectives it took inside blocks."""
    config.layout.recompute = mode
    sizes = check_engine(config)
    built = build(config, sizes, CPU)
    tie_and_starve(built)
    built.stages.train()
    loader = Loader(load_corpus(config.data), config.train.seq_len, config.train.seed)
    rank = built.meshes.data_rank()
    batches = list(loader.microbatches(0, sizes.global_batch, rank, sizes.data_ranks, sizes.microbatch))
    with counted() as talk:
        built.compute.train(batches, sizes.global_batch * config.train.seq_len)
    found = {name: whole(p.grad) for name, p in built.stages.named_parameters() if p.grad is not None}
    return found, talk, built


@torch.no_grad()
def tie_and_starve(built: Built) -> None:
    """Layer 1 has all scores tied, layer 2 an expert without tokens."""
    for layer, moe in built.stages.moe_layers().items():
        if layer == 1:
            moe.router.weight.zero_()
        elif moe.router.balance_E is not None:
            moe.router.balance_E[3] = -10.0


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the layers' own collectives, forward and backward."""
    talk: Counter[str] = Counter()
    places: list[tuple[Any, str, str]] = [
        (dispatch, "exchange", "all_to_all"),
        (TensorParallel, "reduce_scatter", "reduce_scatter"),
        (TensorParallel, "all_gather", "all_gather"),
    ]

    def counting(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            talk[name] += 1
            return original(*args)

        return call

    originals = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in places]
    for owner, attribute, name in places:
        setattr(owner, attribute, counting(getattr(owner, attribute), name))
    try:
        yield talk
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)
        dist.barrier()
