"""Starts gloo ranks for tests. A server imports torch once and forks them: a rank costs milliseconds instead of seconds.

Not for Slurm (tests/slurm) and not for the job script (tests/launchers).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hpcmoe.config.cluster_schema import ClusterConfig
from hpcmoe.config.freeze import freeze
from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.config.schema import CheckpointConfig, Config, DataConfig, LayoutConfig, LoggingConfig, OptimConfig, TrainConfig
from hpcmoe.files import read_json
from hpcmoe.runs.journal import read_journal
from hpcmoe.runs.rundir import RunDir

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "hpcmoe.engine.main"])
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
PATIENCE_S = 300.0  # a machine that is busy with other work must not fail a test


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_env(rank: int, world: int, port: int, attempt: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HPCMOE_ATTEMPT": attempt,
        "OMP_NUM_THREADS": "1",
    }


def _die_with_parent() -> None:
    """The server that forks the ranks ends with pytest; ranks that outlived a killed pytest would compute on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(target: Callable[..., None], env: dict[str, str], log: Path, args: tuple[Any, ...]) -> None:
    _die_with_parent()
    os.environ.update(env)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    try:
        target(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _together(target: Callable[..., None], *args: Any) -> None:
    """Run ``target`` in a process group that its rank environment describes."""
    import torch
    import torch.distributed as dist

    from hpcmoe.engine.world import leave_world

    torch.set_num_threads(1)
    gc.freeze()  # what is imported never becomes garbage
    dist.init_process_group("gloo", init_method="env://")
    target(*args)
    leave_world()


def run_together(world: int, log_dir: Path, target: Callable[..., None], *args: Any, patience_s: float = PATIENCE_S) -> None:
    """``target(*args)`` on ``world`` ranks that have a process group; fails with their output if one fails."""
    port = free_port()
    processes = []
    for rank in range(world):
        env, log = _rank_env(rank, world, port, "test.0"), log_dir / f"rank-{rank}.log"
        processes.append(SERVER.Process(target=_call, args=(_together, env, log, (target, *args)), daemon=True))
    for process in processes:
        process.start()
    deadline = time.monotonic() + patience_s
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            time.sleep(1.0)  # the others may be about to say something; most likely they wait for the one that failed
            break
        time.sleep(0.02)
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    for process in processes:
        process.kill()
    text = "\n".join(f"--- rank {rank}\n{(log_dir / f'rank-{rank}.log').read_text()[-4000:]}" for rank in failed)
    assert not failed, f"ranks {failed} failed\n{text}"


def small_model(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "name": "small",
        "vocab_size": 272,
        "hidden": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "experts": 8,
        "top_k": 2,
        "expert_ffn": 16,
        "aux_loss_coef": 0.01,
    }
    return ModelConfig(**(values | changes))


def small_config(text: Path, world: int, ep: int, steps: int, **sections: Any) -> Config:
    """A resolved config of ``world`` CPU ranks over the text in ``text``; ``sections`` replace whole parts."""
    values: dict[str, Any] = {
        "nodes": 1,
        "gpus_per_node": world,
        "cluster": ClusterConfig(name="test", scheduler="local", device="cpu"),
        "model": small_model(),
        "layout": LayoutConfig(ep=ep, dp_shard=world, microbatch=2),
        "data": DataConfig(source="text", path=str(text)),
        "train": TrainConfig(steps=steps, seq_len=32, global_batch_tokens=32 * 8, seed=3),
        "optim": OptimConfig(lr=3e-3, warmup_steps=4),
        "checkpoint": CheckpointConfig(interval=5, keep_last=2),
        "logging": LoggingConfig(tensorboard=False),
    }
    return Config(**(values | sections))


def write_text(path: Path, seed: int = 0) -> Path:
    """Some 20 kB of words, always the same."""
    words = ["expert", "token", "router", "shard", "mesh", "queue", "requeue", "step", "loss", "layer"]
    value, chosen = seed + 1, []
    for _ in range(3000):
        value = value * 1103515245 + 12345 & 0x7FFFFFFF
        chosen.append(words[(value >> 16) % len(words)])
    path.write_text(" ".join(chosen))
    return path


def make_run(path: Path, config: Config) -> RunDir:
    run = RunDir(path)
    run.control.mkdir(parents=True)
    freeze(config, run.config)
    return run


def run_engine(run_dir: Path) -> None:
    begun = time.monotonic()
    from hpcmoe.engine.stop import StopSignals

    signals = StopSignals().install()
    print("listening", flush=True)
    from hpcmoe.engine.main import run_rank

    run_rank(run_dir, signals, begun)


class Attempt:
    """The engine's ranks of one attempt, as the job script would start them."""

    def __init__(
        self,
        run: RunDir,
        name: str,
        world: int,
        env: dict[str, str] | None = None,
        engine: Callable[[Path], None] | None = None,
    ) -> None:
        self.run, self.name = run, name
        run.attempt(name).mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.ranks: list[BaseProcess] = []
        for rank in range(world):
            rank_env = _rank_env(rank, world, port, name) | (env or {})
            process = SERVER.Process(
                target=_call, args=(engine or run_engine, rank_env, run.rank_log(name, rank), (run.path,)), daemon=True
            )
            process.start()
            self.ranks.append(process)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, f"waited too long\n{self.log()}"
            assert any(rank.is_alive() for rank in self.ranks) or what(), f"the ranks ended before\n{self.log()}"
            time.sleep(0.002)

    def finish(self) -> list[int | None]:
        """Exit codes of all ranks."""
        for rank in self.ranks:
            rank.join(PATIENCE_S)
        codes = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
        return codes

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.run.attempt(self.name).glob("rank-*.log")))

    def verdict(self) -> dict[str, Any] | None:
        return read_json(self.run.verdict(self.name))


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run.journal) if event["event"] == name]
