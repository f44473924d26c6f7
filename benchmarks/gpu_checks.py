"""Checks what only a GPU can show: expert kernels, bf16, NCCL worlds in small layouts, recompute's memory, checkpoints, speed.

    python benchmarks/gpu_checks.py                        # all visible GPUs, or "no GPU here: nothing was checked"
    python benchmarks/gpu_checks.py --rehearse --ranks 4   # the same on CPUs with gloo: shows that the script works, no more

One line a check, "ok" or "FAIL", with its numbers; exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "launchers"))

from hpcmoe.config.compose import load
from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.config.schema import Config
from hpcmoe.config.validate import validate
from hpcmoe.data.corpus import load_corpus
from hpcmoe.data.loader import Loader
from hpcmoe.engine.build import Built, build
from hpcmoe.engine.checkpoint import Checkpointer, Progress, collect_state
from hpcmoe.engine.launch import Launch
from hpcmoe.engine.optimizer import clip_gradients
from hpcmoe.engine.parallelize import initial_values
from hpcmoe.engine.restore import load_newest
from hpcmoe.engine.support import check_engine
from hpcmoe.engine.world import join_world
from hpcmoe.models.attention import rope_tables
from hpcmoe.models.dispatch import layout_rows
from hpcmoe.models.experts import Experts, Kernel, choose_kernel, row_multiple
from hpcmoe.models.live_bytes import LiveBytes
from hpcmoe.planner.activations import layer_activations
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.shapes import from_config
from hpcmoe.planner.workload import Workload

NOTHING = "no GPU here: nothing was checked"
BLOCKS = ModelConfig(
    name="checks",
    vocab_size=512,
    hidden=512,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=64,
    qk_norm=True,
    experts=8,
    top_k=2,
    expert_ffn=512,
)
STEPS = 6


@dataclass(frozen=True)
class Check:
    name: str
    good: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.good else 'FAIL'} {self.name}: {self.detail}"


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fastest(run: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    """Seconds of the fastest of ``rounds`` calls, after one that warms up."""
    run()
    best = float("inf")
    for _ in range(rounds):
        begun = clock(device)
        run()
        best = min(best, clock(device) - begun)
    return best


def check_peak(device: torch.device, size: int) -> Check:
    """Dense matmul rate, which MFU is measured against."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(size, size, device=device, dtype=dtype)
        rates[str(dtype).removeprefix("torch.")] = 2e-12 * size**3 / fastest(lambda a=a: a @ a, device)  # type: ignore[misc]
    words = ", ".join(f"{rate:.3g} TFLOP/s {name}" for name, rate in rates.items())
    return Check("matmul peak", all(rate > 0 for rate in rates.values()), f"{words} ({size} x {size})")


def check_kernels(device: torch.device, width: int = 256) -> list[Check]:
    """Every kernel against fp32 on the CPU, outputs and gradients; an expert has no token, one a single token."""
    checks = []
    counts = [0, 1, 40, 200, 17, 64, 3, 130]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, width, width, generator=generator) / width**0.5 for _ in range(3)]
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        chosen = choose_kernel(device, dtype)
        for kernel in get_args(Kernel):
            if kernel == "grouped_mm" and device.type == "cuda" and dtype == torch.float32:
                continue  # torch has none
            try:
                error, seconds = _kernel_error(device, dtype, kernel, counts, weights)
            except RuntimeError as problem:
                checks.append(Check(f"experts by {kernel}", kernel != chosen, f"{dtype} cannot: {str(problem).splitlines()[0]}"))
                continue
            detail = f"{dtype} worst relative error {error:.1e} (limit {tolerance:.0e}), {seconds * 1e3:.2f} ms forward"
            checks.append(
                Check(f"experts by {kernel}", error < tolerance, detail + (", chosen here" if kernel == chosen else ""))
            )
    return checks


def _kernel_error(
    device: torch.device, dtype: torch.dtype, kernel: Kernel, counts: list[int], weights: list[torch.Tensor]
) -> tuple[float, float]:
    same_size = kernel == "padded_bmm"
    multiple = row_multiple(device, dtype)
    layouts = [layout_rows(counts, multiple, same_size, where) for where in (device, torch.device("cpu"))]
    width = weights[0].shape[1]
    x = torch.zeros(layouts[0].total, width)
    generator = torch.Generator().manual_seed(1)
    for start, count in zip(layouts[0].starts, counts, strict=True):
        x[start : start + count] = torch.randn(count, width, generator=generator)
    x = x.to(dtype).float()
    probe = torch.randn(x.shape, generator=generator).to(dtype).float()
    results, seconds = [], 0.0
    for layout, where, what, how in (
        (layouts[0], device, dtype, kernel),
        (layouts[1], torch.device("cpu"), torch.float32, "loop"),
    ):
        experts = Experts(len(counts), width, width)
        with torch.no_grad():
            for parameter, value in zip(experts.parameters(), weights, strict=True):
                parameter.copy_(value.to(dtype))
        experts.to(device=where, dtype=what)
        rows = x.to(where, what).requires_grad_()
        out = experts(rows, layout, how)
        grads = torch.autograd.grad(out, [rows, *experts.parameters()], probe.to(where, what))
        results.append([tensor.detach().float().cpu() for tensor in (out, *grads)])
        if not seconds:
            with torch.no_grad():
                seconds = fastest(lambda e=experts, r=rows, o=layout, h=how: e(r, o, h), where, 3)  # type: ignore[misc]
    ours, exact = results
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, exact, strict=True)), seconds


def check_recompute(device: torch.device, seq_len: int) -> list[Check]:
    """Bytes that blocks keep, in each mode, against the planner; gradients are those without recompute."""
    dtype, batch = (torch.bfloat16 if device.type == "cuda" else torch.float32), 2  # bf16 rows are padded far on CPUs
    net = initial_values(BLOCKS, 0).to(device=device, dtype=dtype)
    x = torch.randn(batch, seq_len, BLOCKS.hidden, device=device, dtype=dtype, requires_grad=True)
    tables = rope_tables(seq_len, BLOCKS.head_dim, BLOCKS.rope_theta, device)
    shape = from_config(BLOCKS)
    work = Workload(seq=seq_len, batch=batch, imbalance=False, compute_bytes=torch.finfo(dtype).bits / 8)
    kept: dict[str, int] = {}
    checks, wanted = [], None
    for mode in ("none", "selective", "full"):
        net.set_recompute(mode)
        kept[mode], peak, grads = _kept(net, x, tables, device)
        plan = BLOCKS.layers * layer_activations(shape, work, Layout(microbatch=batch), True, mode).kept
        same = wanted is None or all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
        wanted = wanted or grads
        detail = (
            f"keeps {kept[mode] / 2**20:.1f} MiB ({kept[mode] / kept['none']:.0%} of none), planned {plan / 2**20:.1f} MiB "
            f"({plan / kept[mode] - 1:+.1%}), peak {peak / 2**20:.1f} MiB; gradients {'the same' if same else 'DIFFER'}"
        )
        checks.append(Check(f"recompute={mode}", same and abs(plan / kept[mode] - 1) < 0.15, detail))
    return checks


def _kept(net: Any, x: torch.Tensor, tables: Any, device: torch.device) -> tuple[int, int, list[torch.Tensor]]:
    """(bytes when forward ends, peak bytes, gradients) of the blocks alone. On a GPU they are the allocator's."""

    def blocks() -> torch.Tensor:
        out = x
        for block in net.layers.values():
            out, _ = block(out, *tables, 1.0)
        return out

    net.zero_grad()
    if device.type == "cuda":
        blocks().backward(torch.ones_like(x))  # workspaces are allocated now
        net.zero_grad()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        out = blocks()
        kept = torch.cuda.memory_allocated(device) - before
        out.backward(torch.ones_like(out))
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with LiveBytes() as live:
            out = blocks()
            kept = live.now()
            out.backward(torch.ones_like(out))
        peak = live.peak
    return kept, peak, [p.grad.clone() for p in net.parameters() if p.grad is not None]


def layouts(ranks: int) -> dict[str, list[str]]:
    """Small layouts, as overrides, that this many ranks allow; the first number of each name is its world."""
    found = {"1: alone": ["layout.dp_shard=1", "layout.ep=1"]}
    if ranks >= 2:
        found["2: shard, ep 2"] = ["layout.dp_shard=2", "layout.ep=2"]
        found["2: tp 2, ep 2, full recompute"] = ["layout.tp=2", "layout.ep=2", "layout.recompute=full"]
        found["2: pp 2"] = ["layout.pp=2", "layout.ep=1", "layout.microbatch=2"]
    if ranks >= 4:
        found["4: tp 2, pp 2, ep 2"] = ["layout.tp=2", "layout.pp=2", "layout.ep=2", "layout.microbatch=2"]
        found["4: tp 2, shard, ep 4, selective"] = ["layout.tp=2", "layout.ep=4", "layout.recompute=selective"]
        found["4: replicas"] = ["layout.dp_replicate=2", "layout.dp_shard=2", "layout.ep=2"]
    return found


def config_of(world: int, overrides: list[str], device: str) -> Config:
    """A tiny run over Python's own sources, in bf16 on GPUs and in fp32 in a rehearsal."""
    words = ["cluster=local", f"cluster.device={device}", "model=tiny", f"gpus_per_node={world}"]
    words += ["precision=bf16", "train.seq_len=512"] if device == "cuda" else ["precision=fp32", "train.seq_len=64"]
    words += [f"train.global_batch_tokens={16 * (512 if device == 'cuda' else 64)}"]
    words += ["train.steps=100", "optim.lr=3e-3", "optim.warmup_steps=1"]
    return validate(load([*words, "data.max_bytes=200000", "layout.microbatch=4", *overrides]))


def rank_main(rank: int, world: int, port: int, overrides: list[str], device_kind: str, out: str) -> None:
    """One rank of a layout: trains, saves, loads into fresh parts, and rank 0 writes what it saw."""
    device = torch.device("cuda", rank) if device_kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    join_world(Launch(Path(out), "check.0", rank, world, rank, world, "127.0.0.1", port), device)
    config = config_of(world, overrides, device_kind)
    sizes = check_engine(config)
    built = build(config, sizes, device)
    built.stages.train()
    loader = Loader(load_corpus(config.data), config.train.seq_len, config.train.seed)
    losses, seconds = [], float("inf")
    for step in range(STEPS):
        begun = clock(device)
        losses.append(train_step(built, config, loader, step))
        seconds = min(seconds, clock(device) - begun)
    same = round_trip(built, config, Path(out), device)
    if rank == 0:
        tokens = config.train.global_batch_tokens / seconds
        Path(out, "result.json").write_text(json.dumps({"losses": losses, "tokens_per_s": tokens, "same": same}))
    dist.barrier()
    dist.destroy_process_group()


def train_step(built: Built, config: Config, loader: Loader, step: int) -> float:
    """One step as the trainer takes it; the loss."""
    sizes = check_engine(config)
    rank = built.meshes.data_rank()
    batches = loader.microbatches(step * sizes.global_batch, sizes.global_batch, rank, sizes.data_ranks, sizes.microbatch)
    sums = built.compute.train(list(batches), config.train.global_batch_tokens)
    figures = torch.stack([sums.loss_sum.double(), sums.grad_squared.double()])
    tokens = torch.tensor(float(sums.tokens), dtype=torch.float64, device=figures.device)
    dist.all_reduce(figures)
    dist.all_reduce(tokens)
    clip_gradients(built.stages.parameters(), figures[1].sqrt().item(), config.optim.clip_norm)
    built.optimizer.step()
    built.optimizer.zero_grad()
    return (figures[0] / tokens).item()


def round_trip(built: Built, config: Config, folder: Path, device: torch.device) -> bool:
    """Save, load into other parts of the same layout, compare every tensor."""
    checkpointer = Checkpointer(folder / "checkpoints", "check.0", config.checkpoint, {"model": "tiny"}, _Silent(), config.model)  # type: ignore[arg-type]
    failure = checkpointer.save_durably(built.stages, built.optimizer, Progress(step=STEPS))
    assert failure is None, failure
    fresh = build(config, check_engine(config), device)
    load_newest(folder / "checkpoints", "full", {"model": "tiny"}, fresh.stages, fresh.optimizer, checkpointer.group, None)
    ours, theirs = (collect_state(b.stages, b.optimizer, Progress()) for b in (built, fresh))
    same = all(torch.equal(_local(value), _local(theirs["model"][name])) for name, value in ours["model"].items())
    for name, entry in ours["optim"].items():
        same = same and all(torch.equal(_local(value), _local(theirs["optim"][name][key])) for key, value in entry.items())
    agreed = torch.tensor(float(same), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed.item())


class _Silent:
    """A journal that nobody reads."""

    def append(self, *_: object, **__: object) -> None:
        pass


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_layouts(device: torch.device, ranks: int) -> Iterator[Check]:
    """Every layout trains as the first one does, alone; its checkpoint comes back bitwise."""
    alone: list[float] = []
    for name, overrides in layouts(ranks).items():
        world = int(name.split(":")[0])
        with tempfile.TemporaryDirectory() as out, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            try:
                torch.multiprocessing.spawn(rank_main, (world, port, overrides, device.type, out), nprocs=world)
            except Exception as error:
                yield Check(f"layout {name}", False, str(error).strip().splitlines()[-1])
                continue
            result = json.loads(Path(out, "result.json").read_text())
        losses = result["losses"]
        alone = alone or losses
        off = max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True))
        good = off < 0.02 and losses[-1] < losses[0] and result["same"]
        detail = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps, {off:.2%} from alone, checkpoint "
        detail += f"{'bitwise' if result['same'] else 'DIFFERS'}, {result['tokens_per_s']:,.0f} tokens/s"
        yield Check(f"layout {name}", good, detail)


def guarded(run: Callable[[], Iterable[Check]], name: str) -> Iterator[Check]:
    """A check that breaks is a check that failed; the others go on."""
    try:
        yield from run()
    except Exception:
        yield Check(name, False, traceback.format_exc().strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on CPUs, to see that the script works")
    parser.add_argument("--ranks", type=int, help="most ranks of a layout; default: the visible GPUs, or 1")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not args.rehearse:
        print(NOTHING)
        return 0
    device = torch.device("cpu") if args.rehearse else torch.device("cuda", 0)
    ranks = args.ranks or (1 if args.rehearse else gpus)
    if args.rehearse:
        torch.set_num_threads(1)
    what = "CPUs, a rehearsal: no GPU is checked" if args.rehearse else f"{gpus} x {torch.cuda.get_device_name(0)}"
    print(f"on {what}, torch {torch.__version__}")
    small = args.rehearse
    parts: dict[str, Callable[[], Iterable[Check]]] = {
        "matmul peak": lambda: [check_peak(device, 256 if small else 8192)],
        "experts": lambda: check_kernels(device, 64 if small else 1024),
        "recompute": lambda: check_recompute(device, 64 if small else 2048),
        "layouts": lambda: check_layouts(device, ranks),
    }
    failed = 0
    for name, run in parts.items():
        for check in guarded(run, name):
            print(check, flush=True)
            failed += not check.good
    print(f"{failed} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
