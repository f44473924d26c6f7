"""What the ranks of test_parity do: layouts against one process that knows nothing of layouts, and against each other."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcmoe.config.schema import Config, LayoutConfig, Precision, PrecisionConfig
from hpcmoe.data.loader import Loader
from hpcmoe.engine import build as engine_build
from hpcmoe.engine.checkpoint import Checkpointer, Progress
from hpcmoe.engine.manifest import checkpoint_name
from hpcmoe.engine.optimizer import named_moments
from hpcmoe.engine.peak import Peak
from hpcmoe.engine.restore import load_newest
from hpcmoe.engine.stop import StopSignals
from hpcmoe.engine.support import check_engine
from hpcmoe.engine.trainer import Trainer
from hpcmoe.engine.world import leave_world
from hpcmoe.models.experts import Kernel
from hpcmoe.runs.journal import Journal
from tests.engine.parity_reference import SETTINGS, case_config, loader_of, make_ties

CPU = torch.device("cpu")
SAME_LOSS = 2e-5  # absolute; losses are about 5
SAME_NORM = 1e-4  # relative
SAME_GRADIENT = 1e-3  # of the parameter's largest gradient: fp32 sums in another order, over ten steps
SAME_VALUE = 1e-3  # of the largest value


@dataclass(frozen=True)
class Case:
    """One layout in one setting."""

    layout: LayoutConfig
    setting: str = "full"


def lay(pp: int = 1, rep: int = 1, shard: int = 1, tp: int = 1, ep: int = 1, **more: Any) -> LayoutConfig:
    return LayoutConfig(pp=pp, dp_replicate=rep, dp_shard=shard, tp=tp, ep=ep, **more)


CASES_OF_4 = {
    "shard 4": Case(lay(shard=4)),
    "shard 4, ep 2 across": Case(lay(shard=4, ep=2, ep_placement="across")),
    "shard 4, ep 4, selective recompute": Case(lay(shard=4, ep=4, recompute="selective")),
    "replicate 4": Case(lay(rep=4)),
    "replicate 2, shard 2, ep 2": Case(lay(rep=2, shard=2, ep=2)),
    "tp 2, shard 2, selective recompute": Case(lay(shard=2, tp=2, recompute="selective")),
    "tp 2, shard 2, ep 4, microbatches of 2": Case(lay(shard=2, tp=2, ep=4), "pairs"),
    "tp 2, replicate 2, ep 2, full recompute": Case(lay(rep=2, tp=2, ep=2, recompute="full")),
    "a stage without experts: pp 2, shard 2, ep 2": Case(lay(pp=2, shard=2, ep=2)),
    "pp 2 GPipe, replicate 2": Case(lay(pp=2, rep=2, schedule="GPipe")),
    "pp 2 interleaved, replicate 2, recompute by layer": Case(
        lay(pp=2, rep=2, schedule="Interleaved1F1B", recompute="layer"), "four layers"
    ),
    "pp 2 LoopedBFS, shard 2": Case(lay(pp=2, shard=2, schedule="LoopedBFS"), "four layers"),
    "pp 2 ZBV, shard 2, ep 2": Case(lay(pp=2, shard=2, ep=2, schedule="ZBVZeroBubble"), "four layers"),
    "pp 2 DualPipeV, tp 2, ep 2": Case(lay(pp=2, tp=2, ep=2, schedule="DualPipeV"), "four layers"),
    "pp 2 zero bubble, shard 2, ep 2": Case(lay(pp=2, shard=2, ep=2, schedule="InterleavedZeroBubble"), "four layers"),
    "pp 4": Case(lay(pp=4), "four layers"),
    "pp 4 ZBV": Case(lay(pp=4, schedule="ZBVZeroBubble"), "eight layers"),
    "pp 4 DualPipeV": Case(lay(pp=4, schedule="DualPipeV"), "eight layers, eight sequences"),
    "an odd batch, tp 2, shard 2, ep 4": Case(lay(shard=2, tp=2, ep=4), "odd batch"),
    "a single token, ep 4": Case(lay(shard=4, ep=4), "one token"),
    "ties, ep 2, full recompute": Case(lay(shard=4, ep=2, recompute="full"), "ties"),
}
CASES_OF_8 = {
    "pp 2, shard 2, tp 2, ep 4, selective recompute": Case(lay(pp=2, shard=2, tp=2, ep=4, recompute="selective")),
    "pp 4, tp 2, ep 2": Case(lay(pp=4, tp=2, ep=2), "four layers"),
    "replicate 2, shard 2, tp 2, ep 4": Case(lay(rep=2, shard=2, tp=2, ep=4)),
}


@contextlib.contextmanager
def own_world(name: str) -> Iterator[None]:
    """The ranks meet anew under ``name`` and part again: the groups of layouts before are gone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    leave_world(f"before {name}")  # a rank may still be connecting to one that would close the connection here
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        leave_world()
        forget_meshes()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"after {name}", store), rank=rank, world_size=ranks)


def forget_meshes() -> None:
    """Empty DTensor's caches, which keep every mesh and its groups alive: each of gloo's threads wakes 100 times a second."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    gc.collect()


def build(config: Config, loader: Loader, checkpoints: Path, journal: Journal | None) -> Trainer:
    """What hpcmoe.engine.main builds, without a run directory."""
    sizes = check_engine(config)
    built = engine_build.build(config, sizes, CPU)
    built.stages.train()
    return Trainer(
        config=config,
        sizes=sizes,
        attempt="test.0",
        data_rank=built.meshes.data_rank(),
        device=CPU,
        stages=built.stages,
        compute=built.compute,
        optimizer=built.optimizer,
        loader=loader,
        checkpointer=Checkpointer(checkpoints, "test.0", config.checkpoint, {"model": "same"}, journal, config.model),
        progress=Progress(),
        signals=StopSignals(),
        peak=Peak(None, "fp32", "unknown"),
        lead=None,
    )


def trainer_of(config: Config, checkpoints: Path) -> Trainer:
    checkpoints.mkdir(parents=True, exist_ok=True)
    journal = Journal(checkpoints / "events.jsonl", "test.0") if dist.get_rank() == 0 else None
    return build(config, loader_of(config), checkpoints, journal)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, buffers and moments of this rank's stages, whole."""
    return {name: whole(value) for name, value in live_state(trainer).items()}


def window(tensor: torch.Tensor) -> tuple[slice, ...]:
    """What of the whole tensor this rank's part is."""
    if not isinstance(tensor, DTensor):
        return ()
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


def here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def close(ours: torch.Tensor, whole: torch.Tensor, what: str, tolerance: float, where: tuple[slice, ...] | None = None) -> None:
    """``ours`` is this rank's part of ``whole`` (its window, if known: ``where``), within ``tolerance`` of the largest value."""
    part = whole[window(ours) if where is None else where]
    assert here(ours).shape == part.shape, what
    if part.numel():
        worst = (here(ours) - part).abs().max().item()
        scale = max(whole.abs().max().item(), 1e-3)
        assert worst <= tolerance * scale, f"{what}: off by {worst:.2e} where values reach {scale:.2e}"


def each_layout_trains_as_one_process(text: Path, scratch: Path, references: Path, of: int) -> None:
    for name, case in (CASES_OF_4 if of == 4 else CASES_OF_8).items():
        with own_world(name):
            trainer = trainer_of(case_config(text, case.layout, SETTINGS[case.setting]), scratch / name)
            if SETTINGS[case.setting].tie:
                make_ties(trainer.stages.moe_layers())
            same_steps(name, trainer, expected_of(references / case.setting))


@functools.cache
def expected_of(reference: Path) -> list[dict[str, Any]]:
    """Layouts share it; it is this machine's own file, and the safe unpickler takes longer than some layouts' ten steps."""
    loaded: list[dict[str, Any]] = torch.load(reference, mmap=True, weights_only=False)
    return loaded


def same_steps(layout: str, trainer: Trainer, expected: list[dict[str, Any]]) -> None:
    where = layout
    wanted: dict[str, torch.Tensor] = {}
    update = trainer.optimizer.step
    windows = {name: window(value) for name, value in trainer.stages.state_dict().items()}

    def look_and_step() -> None:
        for name, parameter in trainer.stages.named_parameters():
            assert parameter.grad is not None, f"{where}: {name} has no gradient"
            close(parameter.grad, wanted[name], f"{where}, gradient of {name}", SAME_GRADIENT, windows[name])
        update()

    trainer.optimizer.step = look_and_step  # type: ignore[method-assign, assignment]
    assert all_names(trainer) == expected[0]["gradients"].keys()
    for number, want in enumerate(expected, start=1):
        where, wanted = f"{layout}, step {number}", want["gradients"]
        agreed = trainer.train_step()
        assert abs(agreed.loss - want["loss"]) < SAME_LOSS, f"{where}: loss {agreed.loss} {want['loss']}"
        assert abs(agreed.grad_norm / want["norm"] - 1) < SAME_NORM, f"{where}: norm {agreed.grad_norm} {want['norm']}"
        assert want["norm"] > trainer.config.optim.clip_norm, "the case must clip"
        assert torch.equal(agreed.counts_LE, want["counts"]), f"{where}: routing differs"
        for name, value in trainer.stages.state_dict().items():
            tolerance = 0.0 if name.endswith("balance_E") else SAME_VALUE
            close(value, want["state"][name], f"{where}, {name}", tolerance, windows[name])


def all_names(trainer: Trainer) -> set[str]:
    """The parameters' names on all ranks together."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, [name for name, _ in trainer.stages.named_parameters()])
    return {name for part in names for name in part}


RESHARDED = {
    "shard 4": lay(shard=4),
    "tp 2, shard 2, ep 4": lay(shard=2, tp=2, ep=4),
    "pp 2, tp 2, ep 2": lay(pp=2, tp=2, ep=2),
    "pp 2 ZBV, shard 2, ep 2": lay(pp=2, shard=2, ep=2, schedule="ZBVZeroBubble"),
    "replicate 2, shard 2, ep 2 across": lay(rep=2, shard=2, ep=2, ep_placement="across"),
    "pp 4": lay(pp=4),
}


def each_layout_reads_each_others_checkpoint(text: Path, scratch: Path) -> None:
    """Every pair of ``RESHARDED``: values bitwise. Each layout goes on from its own checkpoint and from the one before's."""
    trainers = {}
    windows: dict[str, dict[str, tuple[slice, ...]]] = {}
    for name, layout in RESHARDED.items():
        trainers[name] = trainer_of(case_config(text, layout, SETTINGS["four layers"]), scratch / name)
    for writer, trainer in trainers.items():
        trainer.train_step()
        trainer.checkpointer.start(trainer.stages, trainer.optimizer, trainer.progress)
        assert trainer.checkpointer.wait() is None
        at = Progress(**vars(trainer.progress))
        saved = read_whole(scratch / writer / checkpoint_name(at.step))
        windows[writer] = holds(trainer, saved, f"{writer} as written", windows.get(writer))
        next_loss = trainer.train_step().loss
        for reader, other in trainers.items():
            group = other.checkpointer.group
            progress = load_newest(scratch / writer, "full", {"model": "same"}, other.stages, other.optimizer, group, None)
            assert progress == at, f"{writer} -> {reader}"
            windows[reader] = holds(other, saved, f"{writer} -> {reader}", windows.get(reader))
            if reader not in (writer, list(trainers)[list(trainers).index(writer) - 1]):
                continue
            other.progress = progress
            loss = other.train_step().loss
            assert loss == next_loss if reader == writer else abs(loss - next_loss) < SAME_LOSS, f"{writer} -> {reader}"


def read_whole(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read without any layout."""
    reader = dcp.FileSystemReader(checkpoint)
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def live_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's part of weights, router biases and moments, named as in a checkpoint."""
    values = {f"model.{name}": value for name, value in trainer.stages.state_dict().items()}
    for name, moments in named_moments(trainer.stages.named_parameters(), trainer.optimizer).items():
        values |= {f"optim.{name}.{key}": value for key, value in moments.items()}
    return values


def holds(
    trainer: Trainer, saved: dict[str, torch.Tensor], what: str, windows: dict[str, tuple[slice, ...]] | None
) -> dict[str, tuple[slice, ...]]:
    """This rank's state is bit for bit the saved one. ``windows``: what it holds of each tensor; found if None; returned."""
    state = live_state(trainer)
    windows = windows or {name: window(value) for name, value in state.items()}
    assert windows.keys() == state.keys(), what
    for name, value in state.items():
        assert torch.equal(here(value), saved[name][windows[name]]), f"{what}: {name}"
    return windows


def experts_equal_each_other_in_every_kernel(text: Path, scratch: Path, references: Path) -> None:
    """grouped_mm, padded bmm and the loop train alike over ep=2."""
    config = case_config(text, lay(shard=4, ep=2))
    kernels: tuple[Kernel, ...] = ("padded_bmm", "loop")
    for kernel in kernels:
        trainer = trainer_of(config, scratch / kernel)
        for moe in trainer.stages.moe_layers().values():
            moe.kernel = kernel
        same_steps(kernel, trainer, expected_of(references / "full")[:3])


def bf16_computes_in_bf16_over_fp32_masters(text: Path, scratch: Path, references: Path) -> None:
    for layout in (lay(shard=4, ep=2), lay(pp=2, tp=2, ep=2)):
        config = case_config(text, layout)
        config.precision = PrecisionConfig(name=Precision.bf16)
        trainer = trainer_of(config, scratch / "bf16")
        dtypes: set[torch.dtype] = set()
        for moe in trainer.stages.moe_layers().values():
            moe.experts.register_forward_hook(lambda _module, _inputs, output, seen=dtypes: seen.add(output.dtype))
        for want in expected_of(references / "full")[:3]:
            assert abs(trainer.train_step().loss / want["loss"] - 1) < 0.01
        assert dtypes == ({torch.bfloat16} if trainer.stages.moe_layers() else set())
        assert {value.dtype for value in trainer.stages.state_dict().values()} == {torch.float32}


def run_in_turn(jobs: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    """Several of the above in the same launched ranks."""
    for job, args in jobs:
        with own_world(job.__name__):
            job(*args)
