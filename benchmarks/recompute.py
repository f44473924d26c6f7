"""What each layout.recompute keeps and costs, as a share of recompute=none in the same run, beside the planner's prediction.

    python benchmarks/recompute.py                                  # a small Qwen3-MoE shape, fp32, on this machine
    python benchmarks/recompute.py --hidden 1024 --width 512 --experts 16 --top-k 4 --dtype bf16

The baseline is this engine without recompute: PyTorch's own operators, fused attention, nothing compiled. "kept" are the bytes of
all blocks that are alive when the forward pass ends; tokens are random, so routing is nearly balanced. Time is of forward and
backward: CPU time of one thread on a CPU (steadier than a shared machine's clock), wall time on a GPU. Modes take turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.engine.parallelize import initial_values
from hpcmoe.models.attention import rope_tables
from hpcmoe.models.live_bytes import LiveBytes
from hpcmoe.models.transformer import Transformer
from hpcmoe.planner.activations import layer_activations
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.shapes import from_config
from hpcmoe.planner.workload import Workload

MODES = ("none", "selective", "layer", "full")


@dataclass
class Measured:
    """Bytes when the forward pass ends and at most; seconds by round."""

    kept: int
    peak: int
    seconds: list[float] = field(default_factory=list)

    def times(self, base: Measured) -> float:
        """Time as a share of ``base``'s: the median over rounds, in each of which the two ran one after the other."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.seconds, base.seconds, strict=True))


class Blocks:
    """A model's blocks alone: no embedding, head or loss beside them."""

    def __init__(self, config: ModelConfig, microbatch: int, seq_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.net: Transformer = initial_values(config, 0).to(device=device, dtype=dtype)
        self.x = torch.randn(microbatch, seq_len, config.hidden, dtype=dtype, device=device, requires_grad=True)
        self.tables = rope_tables(seq_len, config.head_dim, config.rope_theta, device)

    def forward(self) -> torch.Tensor:
        x = self.x
        for block in self.net.layers.values():
            x, _ = block(x, *self.tables, 1.0)
        return x

    def seconds(self, device: torch.device) -> float:
        begun = self._clock(device)
        out = self.forward()
        out.backward(torch.ones_like(out))
        passed = self._clock(device) - begun
        self.net.zero_grad()
        return passed

    @staticmethod
    def _clock(device: torch.device) -> float:
        if device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    def bytes(self) -> tuple[int, int]:
        """(kept, peak) of one pass."""
        with LiveBytes() as live:
            out = self.forward()
            kept = live.now()
            out.backward(torch.ones_like(out))
        peak = live.peak
        self.net.zero_grad()
        return kept, peak


def measure(config: ModelConfig, microbatch: int, seq_len: int, dtype: torch.dtype, rounds: int) -> dict[str, Measured]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    blocks = Blocks(config, microbatch, seq_len, dtype, device)
    found = {}
    for mode in MODES:
        blocks.net.set_recompute(mode)
        found[mode] = Measured(*blocks.bytes())
    for _ in range(rounds):
        for mode in MODES:
            blocks.net.set_recompute(mode)
            found[mode].seconds.append(blocks.seconds(device))
    return found


def planned(config: ModelConfig, microbatch: int, seq_len: int, dtype: torch.dtype, mode: str) -> float:
    """Bytes that the planner says the blocks keep."""
    width = torch.finfo(dtype).bits / 8
    work = Workload(seq=seq_len, batch=microbatch, compute_bytes=width, imbalance=False)
    layout, shape = Layout(microbatch=microbatch), from_config(config)
    total = 0.0
    for layer in range(config.layers):
        of_layer = ("none" if layer % 2 else "full") if mode == "layer" else mode
        total += layer_activations(shape, work, layout, layer >= config.first_dense_layers, of_layer).kept
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("width", 512), ("experts", 8), ("top-k", 2), ("seq", 256), ("microbatch", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    config = ModelConfig(
        name="bench",
        vocab_size=16,
        hidden=args.hidden,
        layers=2,
        heads=args.hidden // 64,
        kv_heads=args.hidden // 64,
        head_dim=64,
        qk_norm=True,
        experts=args.experts,
        top_k=args.top_k,
        expert_ffn=args.width,
    )
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    found = measure(config, args.microbatch, args.seq, dtype, args.rounds)
    base, mib = found["none"], 2.0**20
    where = "a GPU" if torch.cuda.is_available() else "a CPU"
    print(f"{args.dtype}, {config.layers} blocks, {args.microbatch} x {args.seq} tokens, on {where}")
    print(
        f"{'recompute':10} {'kept MiB':>9} {'of none':>8} {'planned MiB':>12} {'error':>7} {'peak MiB':>9} {'time of none':>13}"
    )
    for mode, one in found.items():
        plan = planned(config, args.microbatch, args.seq, dtype, mode)
        print(
            f"{mode:10} {one.kept / mib:9.2f} {one.kept / base.kept:8.1%} {plan / mib:12.2f} {plan / one.kept - 1:+7.1%} "
            f"{one.peak / mib:9.2f} {one.times(base):13.3f}"
        )


if __name__ == "__main__":
    main()
