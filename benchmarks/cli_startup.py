"""How long a person waits for --help, status and submit --dry-run, as a ratio to `python -c "import hydra"` (aim: under 2).

Whole processes, interleaved so that a busy machine slows all alike; medians.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "import hydra"
SCRIPT = "import sys; from hpcmoe.cli.main import main; sys.exit(main())"  # what pip writes into bin/hpcmoe
COMMANDS = {
    BASE: ["-c", BASE],
    "hpcmoe --help": ["-c", SCRIPT, "--help"],
    "hpcmoe status": ["-c", SCRIPT, "status"],
    "hpcmoe submit --dry-run": ["-c", SCRIPT, "submit", "--dry-run"],
}
AIM = 2.0


def seconds(arguments: list[str], cwd: Path) -> float:
    """Wall time of one process. Raises CalledProcessError when it fails: a fast failure is no start-up time."""
    environ = dict(os.environ, HPCMOE_RUNS=str(cwd / "runs"))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=cwd, env=environ, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(rounds: int) -> dict[str, float]:
    """Median seconds of each command over ``rounds``, after one round that warms the disk cache."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as cwd:
        for turn in range(rounds + 1):
            for name, arguments in COMMANDS.items():
                took = seconds(arguments, Path(cwd))
                if turn:
                    times[name].append(took)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    medians = measure(args.rounds)
    ratios = {name: median / medians[BASE] for name, median in medians.items()}
    if args.json:
        print(json.dumps({"median_s": medians, "ratio": ratios, "aim": AIM, "rounds": args.rounds}, indent=2))
        return 0
    for name, median in medians.items():
        verdict = "" if name == BASE else ("  ok" if ratios[name] < AIM else f"  above {AIM:g}")
        print(f"{name:<26} {median * 1000:7.0f} ms   {ratios[name]:5.2f} x{verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
