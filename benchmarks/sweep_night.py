"""Does a sweep survive the night? Sixty points over small arrays on a real Slurm, while nodes are taken away again and again.

    python benchmarks/sweep_night.py --seed 0            # as root, with Slurm's packages: starts a testbed and stops it
    python benchmarks/sweep_night.py --user NAME         # the sweep is an ordinary user's

Most points are a shell script that counts and saves (engine=command), two are trainings that are added to the sweep while it
runs; one of each raises an error. Slurm takes arrays of 11 elements (MaxArraySize), and preempts by PreemptMode=REQUEUE. Nobody
supervises. Printed: what happened, and whether every point ended once, with the result of the same point where nothing happens;
whether the two that raise are FAILED in Slurm, in `sweep status`, in `sweep results` and in the exit code, with their words;
whether an element that was not struck was left alone. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.on_testbed import testbed_at
from tests.slurm.sweep_night import Judgement, SweepNight, rage, small_arrays

TRAINED = 2


def report(night: SweepNight, judgement: Judgement, wall_s: float) -> bool:
    """Prints what happened; True when all is well."""
    wrong = judgement.wrong()
    records = judgement.records.values()
    attempts = Counter(attempt.cause for record in records for attempt in record.attempts)
    arrays = [len(event["points"]) for event in night.sweep.read_events() if event["event"] == "array_submitted"]
    print(f"\n{len(records)} points in {wall_s / 60:.1f} min, in arrays of {arrays} elements")
    print(f"{len(night.strikes)} nodes taken away; attempts: " + ", ".join(f"{n} {cause}" for cause, n in attempts.most_common()))
    print(
        "ends: "
        + ", ".join(f"{n} {state}" for state, n in Counter(str(r.finished and r.finished["state"]) for r in records).items())
    )
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return not wrong and judgement.preempted() > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--most", type=int, default=11, help="MaxArraySize")
    parser.add_argument("--strikes", type=int, default=15, help="nodes taken away")
    parser.add_argument("--steps", type=int, default=40, help="of each script, a fifth of a second each")
    parser.add_argument("--at-once", type=int, default=12, help="runs of the sweep at once, over all of its arrays")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--testbed", type=Path, help="a testbed that is up; without it one is started")
    parser.add_argument("--user", help="who submits; this process's user if not given")
    args = parser.parse_args()
    with testbed_at(args.testbed, args.user) as testbed, small_arrays(testbed, args.most):
        chance, runs = random.Random(args.seed), testbed.shared_folder("sweep-night")
        night = SweepNight(testbed, runs, args.user, chance, lambda line: print(line, flush=True), args.steps)
        begun = time.monotonic()
        night.submit_scripts(args.points - TRAINED, f"slurm.array_parallelism={args.at_once}")
        night.add_trained(f"slurm.array_parallelism={args.at_once}")
        rage(night, [chance.uniform(0.0, 6.0) for _ in range(args.strikes)])
        wall_s = time.monotonic() - begun
        with tempfile.TemporaryDirectory(prefix="untouched-") as scratch:
            good = report(night, Judgement(night, Path(scratch), args.most), wall_s)
        if not good:
            print(night.postmortem())
            shutil.copytree(runs, testbed.root / "log" / "runs", ignore=shutil.ignore_patterns("*.distcp"), dirs_exist_ok=True)
    print("all is well" if good else "NOT WELL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
