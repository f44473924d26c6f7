"""What the ranks of test_parity do: every layout against one process that knows nothing of layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from hpcmoe.config.schema import Config, LayoutConfig, OptimConfig, Precision, PrecisionConfig
from hpcmoe.data.corpus import load_corpus
from hpcmoe.data.loader import Loader
from hpcmoe.engine import build as engine_build
from hpcmoe.engine.checkpoint import Checkpointer, Progress
from hpcmoe.engine.optimizer import named_moments
from hpcmoe.engine.parallelize import initial_values
from hpcmoe.engine.peak import Peak
from hpcmoe.engine.restore import load_newest
from hpcmoe.engine.schedule import learning_rate
from hpcmoe.engine.stop import StopSignals
from hpcmoe.engine.support import check_engine
from hpcmoe.engine.trainer import Trainer
from hpcmoe.models.experts import Kernel
from hpcmoe.runs.journal import Journal
from tests.engine.ranks import small_config, small_model

CPU = torch.device("cpu")
STEPS = 3
LAYOUTS = {
    "ep1": LayoutConfig(ep=1, dp_shard=4, microbatch=1),
    "ep2": LayoutConfig(ep=2, dp_shard=4, microbatch=1),
    "ep4": LayoutConfig(ep=4, dp_shard=4, microbatch=1),
    "replicas": LayoutConfig(ep=1, dp_shard=2, dp_replicate=2, microbatch=1),
    "replicas_ep2": LayoutConfig(ep=2, dp_shard=2, dp_replicate=2, microbatch=1),
    "ddp": LayoutConfig(ep=1, dp_shard=1, dp_replicate=4, microbatch=1),
}
# Everything the layer can do at once: a dense layer, shared experts behind a gate, groups, both losses, both biases.
MODEL = small_model(
    layers=3,
    ffn=48,
    first_dense_layers=1,
    shared_experts=1,
    shared_gate=True,
    qk_norm=True,
    attention_bias=True,
    router_bias=True,
    score="sigmoid",
    route_scale=1.5,
    groups=4,
    top_groups=2,
    z_loss_coef=0.001,
    bias_update_rate=0.01,
)


def case_config(text: Path, layout: LayoutConfig) -> Config:
    optim = OptimConfig(lr=1e-2, warmup_steps=1, clip_norm=0.5)
    return small_config(text, 4, 1, STEPS, model=MODEL, layout=layout, optim=optim)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def reference(config: Config, loader: Loader) -> list[dict[str, Any]]:
    """Each step of a plain training loop in one process: one model, microbatches in turn, torch's own clipping and AdamW."""
    model = initial_values(config.model, config.train.seed)
    decaying = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optim = config.optim
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
    )
    batch = config.train.global_batch_tokens // config.train.seq_len
    steps = []
    for step in range(1, STEPS + 1):
        total, counts = 0.0, dict[int, torch.Tensor]()
        for sample in range(batch):
            inputs, targets = loader.batch((step - 1) * batch + sample, 1)
            model.loss_weight = 1 / batch
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / batch).backward()
            total += loss.item() / batch
            for layer, loads in model.drain_loads().items():
                counts[layer] = counts.get(layer, torch.tensor(0)) + loads[0].counts_E
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm).item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train.steps, optim)
        optimizer.step()
        optimizer.zero_grad()
        for layer, moe in model.moe_layers().items():
            assert moe.router.balance_E is not None
            load = counts[layer].double()
            moe.router.balance_E += config.model.bias_update_rate * torch.sign(load.mean() - load).float()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        steps.append({"loss": total, "norm": norm, "gradients": gradients, "counts": counts, "state": state})
    return steps


def build(config: Config, loader: Loader, checkpoints: Path, journal: Journal | None) -> Trainer:
    """What hpcmoe.engine.main builds, without a run directory."""
    sizes = check_engine(config)
    built = engine_build.build(config, sizes, CPU)
    checkpointer = Checkpointer(checkpoints, "test.0", config.checkpoint, {"model": "same"}, journal)
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
        checkpointer=checkpointer,
        progress=Progress(),
        signals=StopSignals(),
        peak=Peak(None, "fp32", "unknown"),
        lead=None,
    )


def close(ours: torch.Tensor, theirs: torch.Tensor, what: str, tolerance: float = 2e-5) -> None:
    worst = (ours - theirs).abs().max().item()
    scale = max(theirs.abs().max().item(), 1e-3)
    assert worst <= tolerance * scale, f"{what}: off by {worst:.2e} where values reach {scale:.2e}"


def every_layout_equals_one_process(text: Path, scratch: Path) -> None:
    configs = {name: case_config(text, layout) for name, layout in LAYOUTS.items()}
    first = next(iter(configs.values()))
    loader = Loader(load_corpus(first.data), first.train.seq_len, first.train.seed)
    expected = reference(first, loader)
    for name, config in configs.items():
        trainer = build(config, loader, scratch / name, None)
        same_steps(name, trainer, expected)


def same_steps(layout: str, trainer: Trainer, expected: list[dict[str, Any]]) -> None:
    seen: dict[str, torch.Tensor] = {}
    update = trainer.optimizer.step

    def step_and_look() -> None:
        seen.update({name: whole(p.grad) for name, p in trainer.stages.named_parameters() if p.grad is not None})
        update()

    trainer.optimizer.step = step_and_look  # type: ignore[method-assign, assignment]
    assert all_names(trainer) == expected[0]["gradients"].keys()
    for number, want in enumerate(expected, start=1):
        agreed = trainer.train_step()
        where = f"{layout}, step {number}"
        assert abs(agreed.loss - want["loss"]) < 1e-5, f"{where}: loss {agreed.loss} {want['loss']}"
        assert abs(agreed.grad_norm / want["norm"] - 1) < 2e-5, f"{where}: norm {agreed.grad_norm} {want['norm']}"
        assert want["norm"] > trainer.config.optim.clip_norm, "the case must clip"
        counts = torch.stack(list(want["counts"].values())).double()
        assert torch.equal(agreed.counts_LE, counts), f"{where}: routing differs"
        for name, gradient in seen.items():
            close(gradient, want["gradients"][name], f"{where}, gradient of {name}", tolerance=1e-4)
        for name, value in trainer.stages.state_dict().items():
            close(whole(value), want["state"][name], f"{where}, {name}", tolerance=2e-3)


def any_layout_reads_any_others_checkpoint(text: Path, scratch: Path) -> None:
    rank = dist.get_rank()
    configs = {name: case_config(text, LAYOUTS[name]) for name in ("ep1", "ep4", "replicas_ep2")}
    first = next(iter(configs.values()))
    loader = Loader(load_corpus(first.data), first.train.seq_len, first.train.seed)
    for writer, config in configs.items():
        folder = scratch / writer
        journal = Journal(scratch / "events.jsonl", "test.0") if rank == 0 else None
        trainer = build(config, loader, folder, journal)
        trainer.train_step()
        wanted, at = everything(trainer), replace(trainer.progress)
        trainer.checkpointer.start(trainer.stages, trainer.optimizer, trainer.progress)
        trainer.train_step()  # while the save is in flight: it must not see these values
        trainer.checkpointer.wait(strict=True)
        for reader, other in configs.items():
            fresh = build(other, loader, folder, None)
            progress = load_newest(
                folder, "full", {"model": "same"}, fresh.stages, fresh.optimizer, fresh.checkpointer.group, None
            )
            assert progress == at, f"{writer} -> {reader}"
            for name, value in everything(fresh).items():
                assert torch.equal(value, wanted[name]), f"{writer} -> {reader}: {name}"


def all_names(trainer: Trainer) -> set[str]:
    """The parameters' names on all ranks together."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, [name for name, _ in trainer.stages.named_parameters()])
    return {name for part in names for name in part}


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    values = {name: whole(value) for name, value in trainer.stages.state_dict().items()}
    for name, moments in named_moments(trainer.stages.named_parameters(), trainer.optimizer).items():
        values |= {f"{name}/{key}": whole(value) for key, value in moments.items()}
    return values


def experts_equal_each_other_in_every_kernel(text: Path, scratch: Path) -> None:
    """grouped_mm, padded bmm and the loop train alike over ep=2."""
    config = case_config(text, LAYOUTS["ep2"])
    loader = Loader(load_corpus(config.data), config.train.seq_len, config.train.seed)
    expected = reference(config, loader)
    kernels: tuple[Kernel, ...] = ("padded_bmm", "loop")
    for kernel in kernels:
        trainer = build(config, loader, scratch / kernel, None)
        for moe in trainer.stages.moe_layers().values():
            moe.kernel = kernel
        same_steps(kernel, trainer, expected)


def bf16_computes_in_bf16_over_fp32_masters(text: Path, scratch: Path) -> None:
    config = case_config(text, LAYOUTS["ep2"])
    loader = Loader(load_corpus(config.data), config.train.seq_len, config.train.seed)
    expected = reference(config, loader)
    config.precision = PrecisionConfig(name=Precision.bf16)
    trainer = build(config, loader, scratch / "bf16", None)
    dtypes = set()
    for moe in trainer.stages.moe_layers().values():
        moe.experts.register_forward_hook(lambda _module, _inputs, output: dtypes.add(output.dtype))
    for want in expected:
        assert abs(trainer.train_step().loss / want["loss"] - 1) < 0.01
    assert dtypes == {torch.bfloat16}
    assert {value.dtype for value in trainer.stages.state_dict().values()} == {torch.float32}
