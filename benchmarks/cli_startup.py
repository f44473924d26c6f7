"""How long a person waits for --help, status and submit --dry-run, as a ratio to `python -c "import hydra"` (aim: under 2);
and for a plan of 128 nodes, in seconds (aim: under 1).

Whole processes, interleaved so that a busy machine slows all alike; medians of wall time and of CPU time. Python may keep its
compiled modules, as pip does when it installs a package: here in a directory that a first round, not counted, fills.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "import hydra"
SCRIPT = "import sys; from hpcmoe.cli.main import main; sys.exit(main())"  # what pip writes into bin/hpcmoe
PLAN = "hpcmoe plan, 128 nodes"
COMMANDS = {
    BASE: ["-c", BASE],
    "hpcmoe --help": ["-c", SCRIPT, "--help"],
    "hpcmoe status": ["-c", SCRIPT, "status"],
    "hpcmoe submit --dry-run": ["-c", SCRIPT, "submit", "--dry-run"],
    PLAN: ["-c", SCRIPT, "plan", "model=moe_1t", "cluster=leonardo", "nodes=128"],
}
AIM = 2.0  # times BASE; PLAN has its own aim
PLAN_AIM_S = 1.0


@dataclass(frozen=True)
class Took:
    """Seconds of one process: on the clock, and of CPU time with its children's."""

    wall: float
    cpu: float


def run(arguments: list[str], cwd: Path) -> Took:
    """One process. Raises CalledProcessError when it fails: a fast failure is no start-up time."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"HPCMOE_RUNS": str(cwd / "runs"), "PYTHONPYCACHEPREFIX": str(cwd / "compiled")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    before, started = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=cwd, env=environ, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Took(wall, cpu)


def measure(rounds: int) -> dict[str, Took]:
    """Medians of each command over ``rounds``, after one that is not counted."""
    times: dict[str, list[Took]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as cwd:
        for turn in range(rounds + 1):
            for name, arguments in COMMANDS.items():
                took = run(arguments, Path(cwd))
                if turn:
                    times[name].append(took)
    return {
        name: Took(statistics.median(t.wall for t in taken), statistics.median(t.cpu for t in taken))
        for name, taken in times.items()
    }


def _verdict(name: str, took: Took, base: Took) -> str:
    if name == BASE:
        return ""
    if name == PLAN:
        return "ok" if took.wall < PLAN_AIM_S else f"above {PLAN_AIM_S:g} s"
    return "ok" if took.wall / base.wall < AIM else f"above {AIM:g} x"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    medians = measure(args.rounds)
    base = medians[BASE]
    if args.json:
        document = {
            "median_s": {name: took.wall for name, took in medians.items()},
            "cpu_s": {name: took.cpu for name, took in medians.items()},
            "ratio": {name: took.wall / base.wall for name, took in medians.items()},
            "cpu_ratio": {name: took.cpu / base.cpu for name, took in medians.items()},
            "aim": AIM,
            "plan_aim_s": PLAN_AIM_S,
            "rounds": args.rounds,
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"{'':<26} {'wall':>8} {'CPU':>10} {'wall ratio':>11} {'CPU ratio':>10}")
    for name, took in medians.items():
        ratios = f"{took.wall / base.wall:9.2f} x {took.cpu / base.cpu:8.2f} x"
        print(f"{name:<26} {took.wall * 1000:5.0f} ms {took.cpu * 1000:7.0f} ms {ratios}  {_verdict(name, took, base)}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
