"""Tokens/s of this engine on one small Qwen3-MoE shape, as a ratio to transformers' in the same run, and to the matmul peak.

    python benchmarks/engine_speed.py                    # one process, 2 threads, fp32 and bf16; transformers if it is installed
    python benchmarks/engine_speed.py --ranks 2          # gloo ranks of one thread each: experts spread, the rest sharded
    pip install 'hpcmoe[bench]'                          # transformers at the version that the ratio is stated for

8 layers, hidden 256, 4 heads x 64, 8 experts top-2 of width 512, 8 sequences of 256 tokens, vocabulary 2048: 28.3 M parameters.
A step is forward, backward and AdamW. Both take turns, so that a busy machine slows both; medians, and the fastest step beside.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpcmoe.config.cluster_schema import ClusterConfig
from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.config.schema import Config, DataConfig, LayoutConfig, OptimConfig, Precision, PrecisionConfig, TrainConfig
from hpcmoe.engine.build import build
from hpcmoe.engine.launch import Launch
from hpcmoe.engine.optimizer import clip_gradients
from hpcmoe.engine.support import check_engine
from hpcmoe.engine.world import join_world
from hpcmoe.models.accounting import flops_per_token

CPU = torch.device("cpu")
SEQ, BATCH = 256, 8
SHAPE = ModelConfig(
    name="qwen3_moe_small",
    vocab_size=2048,
    hidden=256,
    layers=8,
    heads=4,
    kv_heads=4,
    head_dim=64,
    qk_norm=True,
    experts=8,
    top_k=2,
    expert_ffn=512,
    aux_free_bias=False,
)
Step = Callable[[], object]


def config_of(world: int, precision: Precision) -> Config:
    """Each rank trains on BATCH sequences a step."""
    return Config(
        gpus_per_node=world,
        cluster=ClusterConfig(name="bench", scheduler="local", device="cpu"),
        model=SHAPE,
        layout=LayoutConfig(ep=world, dp_shard=world, microbatch=BATCH),
        data=DataConfig(),
        train=TrainConfig(steps=1, seq_len=SEQ, global_batch_tokens=SEQ * BATCH * world),
        optim=OptimConfig(lr=3e-4),
        precision=PrecisionConfig(name=precision),
    )


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, SHAPE.vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(rank))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(world: int, rank: int, precision: Precision) -> Step:
    """A step as the trainer takes it, clipping included."""
    config = config_of(world, precision)
    built = build(config, check_engine(config), CPU)
    built.stages.train()
    data = [batch(rank)]

    def step() -> None:
        sums = built.compute.train(data, SEQ * BATCH * world)
        norm = sums.grad_squared
        dist.all_reduce(norm)
        clip_gradients(built.stages.parameters(), norm.sqrt().item(), 1.0)
        built.optimizer.step()
        built.optimizer.zero_grad()

    return step


def theirs(world: int, rank: int, precision: Precision) -> Step:
    """transformers' Qwen3-MoE with its grouped matmul; over ranks by FSDP2, its blocks wrapped as ours are."""
    import transformers

    settings = transformers.Qwen3MoeConfig(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        num_experts=SHAPE.experts,
        num_experts_per_tok=SHAPE.top_k,
        moe_intermediate_size=SHAPE.expert_ffn,
        intermediate_size=SHAPE.expert_ffn,
        max_position_embeddings=SEQ,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        use_cache=False,
    )
    settings._attn_implementation = "sdpa"
    settings._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(settings).train()
    if world > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(torch.bfloat16 if precision is Precision.bf16 else None, torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    elif precision is Precision.bf16:
        model = model.to(torch.bfloat16)  # its masters too: less work than ours has
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    inputs, targets = batch(rank)

    def step() -> None:
        loss = F.cross_entropy(model(input_ids=inputs).logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def matmul_rate(dtype: torch.dtype, size: int = 512, seconds: float = 0.3) -> float:
    """FLOP/s of the fastest of many matmuls, all threads."""
    a = torch.randn(size, size, dtype=dtype)
    best, begun = 0.0, time.perf_counter()
    while (start := time.perf_counter()) - begun < seconds:
        torch.mm(a, a)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best


def compare(world: int, rank: int, precision: Precision, rounds: int) -> None:
    dtype = torch.bfloat16 if precision is Precision.bf16 else torch.float32
    steps = {"hpcmoe": ours(world, rank, precision)}
    if find_spec("transformers") is not None:
        steps["transformers"] = theirs(world, rank, precision)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    peaks = []
    for turn in range(rounds + 2):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            if turn >= 2:
                taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        peaks.append(matmul_rate(dtype))
    if rank == 0:
        report(world, precision, taken, max(peaks) * world)


def middle_wall(taken: list[tuple[float, float]]) -> float:
    return statistics.median(wall for wall, _ in taken)


def least_wall(taken: list[tuple[float, float]]) -> float:
    return min(wall for wall, _ in taken)


def middle_cpu(taken: list[tuple[float, float]]) -> float:
    """CPU seconds a step: what a busy machine disturbs least."""
    return statistics.median(cpu for _, cpu in taken)


def report(world: int, precision: Precision, taken: dict[str, list[tuple[float, float]]], peak: float) -> None:
    tokens = SEQ * BATCH * world
    flops = flops_per_token(SHAPE, SEQ, "titan")
    threads = torch.get_num_threads()
    print(f"{precision.value}, {world} ranks x {threads} threads; matmul peak {peak / 1e9:.0f} GFLOP/s")
    for name, both in taken.items():
        seconds = [wall for wall, _ in both]
        middle, least = statistics.median(seconds), min(seconds)
        rate = tokens / middle
        print(
            f"  {name:13} {rate:7,.0f} tokens/s median, {tokens / least:7,.0f} fastest; {flops * rate / 1e9:6.1f} GFLOP/s "
            f"(titan), {flops * rate / peak:.1%} of the matmul peak"
        )
    if len(taken) == 2:
        theirs, ours = taken["transformers"], taken["hpcmoe"]
        middle, least, cpu = (of(theirs) / of(ours) for of in (middle_wall, least_wall, middle_cpu))
        print(f"  hpcmoe is {middle:.2f} x transformers (fastest steps: {least:.2f} x; by CPU time: {cpu:.2f} x)")
    else:
        print("  transformers is not installed: no ratio")


def main_of_rank(rank: int, world: int, port: int, threads: int, precisions: list[str], rounds: int) -> None:
    torch.set_num_threads(threads)
    join_world(Launch(Path(), "bench.0", rank, world, rank, world, "127.0.0.1", port), CPU)
    for name in precisions:
        compare(world, rank, Precision(name), rounds)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of each rank; default: 2 of one rank, 1 of several")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    threads = args.threads or (2 if args.ranks == 1 else 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rest = (args.ranks, port, threads, args.precision, args.rounds)
    if args.ranks == 1:
        main_of_rank(0, *rest)
    else:
        torch.multiprocessing.spawn(main_of_rank, rest, nprocs=args.ranks)


if __name__ == "__main__":
    main()
