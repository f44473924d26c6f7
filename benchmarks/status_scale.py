"""What `hpcmoe status` of a thousand runs costs: CPU seconds of the whole command and of one poll, and Slurm commands.

Each run has a dozen attempts, hundreds of checkpoints in its journal and 20,000 lines of metrics, and a job that a recorded-form
squeue (or, for one in ten, only sacct) answers for. Times are CPU seconds, and ratios to plain reading: opening the same files
and reading their last 4 KiB, which a busy machine slows as much. "first": nothing is remembered of the journals. Exit code 1
when a limit is passed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hpcmoe.runs import gist  # noqa: E402
from hpcmoe.runs.glance import Glancer, glance  # noqa: E402
from hpcmoe.runs.observe import observe  # noqa: E402
from hpcmoe.runs.registry import list_runs  # noqa: E402
from hpcmoe.slurm.facts import ACCT_COLUMNS, QUEUE_COLUMNS  # noqa: E402
from hpcmoe.slurm.parse import SEPARATOR  # noqa: E402

MOST_COMMANDS = 2
# Times plain reading. The aim is 1 s of CPU for 1,000 runs on a machine with nothing else to do, where plain reading takes 25 ms.
MOST_RATIO = 40.0
PLAIN = "plain reading"
ATTEMPTS, CHECKPOINTS, LINES = 12, 17, 20_000
STARTED = 1_796_000_000.0


def journal(run_id: str, job_id: str) -> str:
    """A run that was preempted eleven times and goes on."""
    events: list[dict[str, object]] = [
        {"event": "planned", "attempt": None, "run_id": run_id, "name": "sweep", "scheduler": "slurm", "steps": LINES},
        {"event": "submitted", "attempt": None, "job_id": job_id, "how": "submit"},
    ]
    for restart in range(ATTEMPTS):
        attempt = f"{job_id}.{restart}"
        first = {
            "imports": 22.42,
            "rendezvous": 11.77,
            "corpus": 1.777,
            "build": 0.167,
            "load": 2.1,
            "peak": 0.216,
            "first_step": 3.2,
        }
        hosts = [f"lrdn{number:04d}" for number in range(16)]
        events += [
            {
                "event": "attempt_started",
                "attempt": attempt,
                "job_id": job_id,
                "restart": restart,
                "nodes": 16,
                "hosts": hosts,
                "gpus": 64,
            },
            {"event": "resumed", "attempt": attempt, "step": restart * 1700, "checkpoint": f"step-{restart * 1700:08d}"},
            {"event": "first_step", "attempt": attempt, "step": restart * 1700 + 1, "startup": first},
        ]
        for save in range(1, CHECKPOINTS + 1):
            step = restart * 1700 + save * 100
            events.append({"event": "checkpoint_saved", "attempt": attempt, "step": step, "seconds": 1.5, "bytes": 12_297_731})
        if restart < ATTEMPTS - 1:
            events += [
                {"event": "left", "attempt": attempt, "step": restart * 1700 + 1700, "verdict": "leave", "save_s": 1.5599},
                {"event": "attempt_ended", "attempt": attempt, "cause": "preempted", "detail": None, "rc": 0, "heard": ["TERM"]},
                {"event": "requeued", "attempt": attempt, "job_id": job_id, "by": "hpcmoe"},
            ]
    return "".join(json.dumps({"t": STARTED + 60.0 * number, **event}) + "\n" for number, event in enumerate(events))


def metrics(job_id: str) -> str:
    step = {
        "loss": 5.660317063331604,
        "grad_norm": 4.9192799763515405,
        "lr": 0.0001,
        "tokens_per_s": 1389.0683818152957,
        "mfu": 0.0595,
    }
    rest = {
        "flops_convention": "titan",
        "peak_tflops": 19968.0,
        "precision": "bf16",
        "aux_loss": 1.0375,
        "z_loss": 4.39,
        "seconds": 2.9,
    }
    lines = (
        {"step": n, **step, "tokens": 4096 * n, **rest, "attempt": f"{job_id}.11", "t": STARTED + n} for n in range(1, LINES + 1)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def build(root: Path, count: int) -> None:
    """Run directories, and a Slurm whose answers are files. One large metrics file is linked into every run."""
    (root / "runs").mkdir()
    (root / "metrics.jsonl").write_text(metrics("1000000"))
    queue, ended = [], []
    for number in range(count):
        job_id = str(1_000_000 + number)
        run = root / "runs" / f"r{number:05d}"
        run.mkdir()
        (run / "events.jsonl").write_text(journal(run.name, job_id))
        os.link(root / "metrics.jsonl", run / "metrics.jsonl")
        if number % 10:
            cells = [
                job_id,
                "RUNNING",
                "None",
                f"{STARTED + 9:.0f}",
                f"{STARTED + 10:.0f}",
                f"{STARTED + 1e5:.0f}",
                16,
                "lrdn[0001-0016]",
            ]
            queue.append(SEPARATOR.join(map(str, [*cells, "me", "hpcmoe-sweep", "(null)"])))
        else:
            cells = [
                job_id,
                "NODE_FAIL",
                "0:0",
                f"{STARTED + 9:.0f}",
                f"{STARTED + 10:.0f}",
                f"{STARTED + 99:.0f}",
                89,
                "gres/gpu=64",
            ]
            ended.append(SEPARATOR.join(map(str, [*cells, "lrdn[0001-0016]", "hpcmoe-sweep"])))
    assert len(queue[0].split(SEPARATOR)) == len(QUEUE_COLUMNS)
    assert len(ended[0].split(SEPARATOR)) == len(ACCT_COLUMNS)
    (root / "bin").mkdir()
    for command, rows in (("squeue", queue), ("sacct", ended)):
        random.Random(0).shuffle(rows)
        (root / f"{command}.out").write_text("\n".join(rows) + "\n")
        (root / "bin" / command).write_text(f'#!/bin/sh\necho "$0" >>{root}/commands\nexec cat {root}/{command}.out\n')
        (root / "bin" / command).chmod(0o755)


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process and of the children that it waited for."""

    def used() -> float:
        return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

    before = used()
    work()
    return used() - before


def commands(root: Path) -> int:
    log = root / "commands"
    asked = len(log.read_text().splitlines()) if log.exists() else 0
    log.unlink(missing_ok=True)
    return asked


def plain_reading(root: Path) -> None:
    for name in os.listdir(root / "runs"):
        if name.startswith("."):
            continue
        for file in ("events.jsonl", "metrics.jsonl"):
            fd = os.open(root / "runs" / name / file, os.O_RDONLY)
            os.pread(fd, 4096, max(0, os.fstat(fd).st_size - 4096))
            os.close(fd)


def measure(root: Path, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """The least CPU time of each over ``rounds``, taken in turns so that a busy machine slows all alike."""
    build(root, count)
    os.environ.update(HPCMOE_RUNS=str(root / "runs"), PATH=f"{root / 'bin'}:{os.environ['PATH']}")
    environ = dict(os.environ, PYTHONPATH=str(ROOT))

    def status(*words: str) -> None:
        command = [sys.executable, "-m", "hpcmoe", "status", *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        states = done.stdout.count("RUNNING"), done.stdout.count("STOPPED")
        assert states == (count - len(range(0, count, 10)), len(range(0, count, 10))), states

    def first_status() -> None:
        (root / "runs" / gist.FILE).unlink(missing_ok=True)
        status()

    def poll(glancer: Glancer) -> None:
        now = time.time()
        views = observe(glancer.read_all(list_runs(root / "runs")), now)
        assert sum(glance(view, now).step or 0 for view in views) == count * LINES

    old = Glancer()
    works: dict[str, Callable[[], object]] = {
        PLAIN: lambda: plain_reading(root),
        "first status": first_status,
        "hpcmoe status": status,
        "status --json": lambda: status("--json"),
        "first poll": lambda: poll(Glancer()),
        "next poll": lambda: poll(old),
    }
    poll(old)  # warms the disk cache
    commands(root)
    result: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, work in works.items():
            started = time.perf_counter()
            row = {"cpu_s": cpu_s(work), "wall_s": time.perf_counter() - started, "slurm_commands": commands(root)}
            result[name] = min(row, result.get(name, row), key=lambda one: one["cpu_s"])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    gc.set_threshold(100_000)  # as the command line does
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.runs, args.rounds)
    base = result[PLAIN]["cpu_s"]
    bad = [name for name, row in result.items() if row["cpu_s"] > MOST_RATIO * base or row["slurm_commands"] > MOST_COMMANDS]
    if args.json:
        print(json.dumps({"runs": args.runs, "load": os.getloadavg()[0], "over_limit": bad, **result}, indent=2))
        return int(bool(bad))
    print(f"{args.runs} runs x {ATTEMPTS} attempts x {LINES} steps; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, row in result.items():
        cpu = f"{row['cpu_s']:6.2f} s CPU {row['cpu_s'] / base:6.1f} x"
        asked = f"{row['wall_s']:6.2f} s wall  {row['slurm_commands']:.0f} commands"
        print(f"{name:<16} {cpu}  {asked}{'  OVER' if name in bad else ''}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
