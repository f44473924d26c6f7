"""``python -m hpcmoe.engine.preflight RUN_DIR``: one rank's share of a test of the job's nodes, before any training.

Memory, matrix products, the file system, then an all-reduce of all ranks: a minute at most. Figures go to
``attempts/<attempt>/preflight/rank-*.json``, written after each part; hpcmoe.runs.preflight judges them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcmoe.files import write_json
from hpcmoe.runs.rundir import RunDir

if TYPE_CHECKING:
    import torch

    from hpcmoe.config.schema import Config
    from hpcmoe.engine.launch import Launch

LIMIT_S = 60.0  # from the end of the imports, which a cold file system may make slow
MEET_S = 30.0  # for ranks to meet, and for one all-reduce
MATMUL_S = 0.5
MATMUL_SIZE = {"cuda": 8192, "cpu": 384}
# Of what is free. All of a GPU's memory is to be written once; on a CPU node the pages belong to everybody.
MEMORY_SHARE = {"cuda": 0.9, "cpu": 0.0}
LEAST_MEMORY = 64 * 2**20  # bytes
FILE_BYTES = 4 * 2**20
REDUCE_BYTES = {"cuda": 256 * 2**20, "cpu": 2**20}
REDUCES = 5


class Card:
    """What this rank has found so far, on disk after every part, so that a rank that dies has said how far it came."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.facts: dict[str, Any] = {"rank": rank, "host": host, "part": "start"}
        self._lock = threading.Lock()

    def tell(self, **facts: Any) -> None:
        with self._lock:
            self.facts |= facts
            write_json(self.path, self.facts)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m hpcmoe.engine.preflight RUN_DIR", file=sys.stderr)
        return 2
    from hpcmoe.config.freeze import load_frozen
    from hpcmoe.engine.launch import read_launch

    run = RunDir(Path(argv[0]).absolute())
    launch = read_launch(run.path, os.environ)
    folder = run.preflight(launch.attempt)
    folder.mkdir(parents=True, exist_ok=True)
    card = Card(folder / f"rank-{launch.rank:04d}.json", launch.rank)
    _hear(run, launch.attempt, card)
    card.tell(part="imports")
    import torch.distributed  # noqa: F401  the clock runs once it is there

    watch = threading.Timer(LIMIT_S, _out_of_time, (card,))
    watch.daemon = True
    watch.start()
    try:
        examine(load_frozen(run.config), launch, card, folder)
    except Exception as error:
        card.tell(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300])
        print(f"rank {launch.rank}: {card.facts['part']}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of a collective that never ended would hold the exit


def _hear(run: RunDir, attempt: str, card: Card) -> None:
    """A stop request ends the test at once, and is passed on to the ranks, which leave before their first step."""

    def leave(number: int, frame: object) -> None:
        run.notice(attempt).touch()
        card.tell(stopped=True)
        os._exit(0)

    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, leave)


def _out_of_time(card: Card) -> None:
    card.tell(error=f"not done after {LIMIT_S:.0f} s")
    os._exit(0)


def examine(config: Config, launch: Launch, card: Card, folder: Path) -> None:
    """All parts in turn. Raises what goes wrong; the card says in which part."""
    import torch
    import torch.distributed as dist

    from hpcmoe.engine.world import join_world, leave_world, pick_device

    begun = time.monotonic()
    torch.set_num_threads(1)
    card.tell(part="device")
    device = pick_device(config.cluster.device, launch.local_rank)
    card.tell(part="memory")
    card.tell(memory_gb_s=memory_rate(device))
    card.tell(part="matmul")
    card.tell(matmul_tflops=matmul_rate(device))
    card.tell(part="file system")
    card.tell(write_mb_s=write_rate(folder / f".{launch.rank:04d}.test"))
    card.tell(part="all_reduce")
    join_world(launch, device, MEET_S, MEET_S)
    card.tell(all_reduce_gb_s=all_reduce_rate(device, dist.get_world_size()))
    leave_world()
    card.tell(part="done", seconds=round(time.monotonic() - begun, 3))


def memory_rate(device: torch.device) -> float:
    """GB/s of writing a pattern into memory and reading it back. Raises MemoryError where another one is read."""
    import torch

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    count = max(LEAST_MEMORY, int(free * MEMORY_SHARE[device.type])) // 8
    cells = torch.empty(count, dtype=torch.int64, device=device)
    _synchronize(device)
    begun = time.monotonic()
    for pattern in (0x5555555555555555, -0x5555555555555556):
        cells.fill_(pattern)
        lowest, highest = torch.aminmax(cells)
        if int(lowest) != pattern or int(highest) != pattern:
            raise MemoryError(f"memory holds {int(lowest):x} to {int(highest):x} where {pattern:x} was written")
    return round(4 * 8 * count / (time.monotonic() - begun) / 1e9, 3)


def matmul_rate(device: torch.device) -> float:
    """TFLOP/s of the fastest of many products, which must all be the same to the bit. Raises ArithmeticError otherwise."""
    import torch

    size, dtype = MATMUL_SIZE[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(size, size, generator=generator, device=device).to(dtype)
    first = a @ a
    _synchronize(device)
    best, begun = float("inf"), time.monotonic()
    while time.monotonic() - begun < MATMUL_S:
        start = time.perf_counter()
        again = a @ a
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    if not torch.equal(first, again):
        raise ArithmeticError("the same product of matrices came out twice, and different")
    return round(2.0 * size**3 / best / 1e12, 4)


def write_rate(path: Path) -> float:
    """MB/s of a durable write into the run directory, read back. Raises OSError."""
    content = os.urandom(FILE_BYTES)
    begun = time.monotonic()
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.monotonic() - begun
        if path.read_bytes() != content:
            raise OSError(f"{path} was read back changed")
    finally:
        path.unlink(missing_ok=True)
    return round(FILE_BYTES / seconds / 1e6, 3)


def all_reduce_rate(device: torch.device, ranks: int) -> float:
    """GB/s of an all-reduce over all ranks (bytes reduced, per second). Raises ArithmeticError for a wrong sum."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(REDUCE_BYTES[device.type] // 4, device=device)
    dist.all_reduce(ones)  # makes the communicator
    if not bool((ones == ranks).all()):
        raise ArithmeticError(f"the sum of {ranks} ones came out wrong")
    _synchronize(device)
    begun = time.monotonic()
    for _ in range(REDUCES):
        dist.all_reduce(ones)
    _synchronize(device)
    return round(REDUCES * REDUCE_BYTES[device.type] / (time.monotonic() - begun) / 1e9, 4)


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
