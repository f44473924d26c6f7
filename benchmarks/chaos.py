"""Does a run survive the night? Faults of every kind against several runs at once on a real Slurm, until all runs are done.

    python benchmarks/chaos.py --faults 100 --seed 0     # as root, with Slurm's packages: starts a testbed and stops it
    python benchmarks/chaos.py --testbed DIR --user NAME --faults 10     # a testbed that is up; as an ordinary user
    python benchmarks/chaos.py --faults 0 --compare     # no storm: benchmarks/goodput.py, against a plain script and submitit

Faults: preemption (with grace and without, requeueing and cancelling, with and without the job's own signal), killed ranks,
dead nodes, an administrator's requeue, damaged checkpoints, slurmctld and slurmdbd away, a killed supervisor (two always run),
a full disk. Printed: faults by kind, steps lost by cause, goodput, and for each run whether every loss that it ever wrote is bit
for bit that of a run that nobody touched. Exit code 1 if a run is lost, a loss differs, two attempts wrote at once, a step was
lost although there was warning, or more than a checkpoint interval without. Beyond the interval may go what was done while a save
was being written, or while the disk was full: nobody can save it then.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import goodput
from benchmarks.on_testbed import testbed_at
from hpcmoe.runs.journal import iter_json_lines
from hpcmoe.runs.rundir import RunDir
from tests.slurm import storm as storms
from tests.slurm.night import Night
from tests.slurm.testbed_client import Testbed

# Causes whose warning comes early enough for a save, on the testbed.
WARNED = frozenset({"preempted", "requeued", "signalled", "time_limit", "stopped", "cancelled", "completed"})


@contextmanager
def small_disk(folder: Path, size_mb: int) -> Iterator[None]:
    """A file system of its own for the runs, which can then be full without harm to anybody."""
    mounted = os.geteuid() == 0
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=1777", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def untouched_losses(night: Night, scratch: Path) -> dict[int, float]:
    """The same config on two ranks of this machine, to which nothing happens."""
    from tests.engine.ranks import Attempt as Ranks

    (scratch / "control").mkdir(parents=True)
    (scratch / "config.yaml").write_bytes((night.dir / "config.yaml").read_bytes())
    ranks = Ranks(RunDir(scratch), "untouched.0", 2, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    if any(ranks.finish()):
        raise RuntimeError(ranks.log())
    return {line["step"]: line["loss"] for line in iter_json_lines(scratch / "metrics.jsonl")}


def wrong_with(night: Night, untouched: dict[int, float], damaged: int, full: Sequence[tuple[float, float]] = ()) -> list[str]:
    """What should not have happened to this run, in words; empty: all is well. ``full``: when the disk was, epoch s."""
    status = night.status()
    found = [] if status["state"] == "COMPLETED" else [f"is {status['state']}: {status['reason']}"]
    losses = night.losses()
    if sorted(losses) != sorted(untouched):
        found.append(f"made {len(losses)} of {len(untouched)} steps")
    differing = [step for step, values in losses.items() if values != {untouched.get(step)}]
    if differing:
        found.append(f"losses of {len(differing)} steps differ, first in step {min(differing)}")
    found += [f"attempts {one} and {other} wrote at the same time" for one, other in writers_at_once(night)]
    slowest_s = max((event["seconds"] for event in night.events("checkpoint_saved")), default=0.0)
    metrics = night.metrics()
    for attempt in status["attempts"]:
        lost = attempt["steps_lost"] or 0
        times = [line["t"] for line in metrics if line["attempt"] == attempt["attempt"]]
        most = most_lost(attempt, times, damaged, slowest_s, full)
        if lost > most:
            found.append(f"attempt {attempt['attempt']} ({attempt['cause']}) lost {lost} steps, over {most}")
    return found


def most_lost(
    attempt: Mapping[str, Any], times: Sequence[float], damaged: int, slowest_s: float, full: Sequence[tuple[float, float]]
) -> int:
    """How many steps an attempt may lose. ``times``: when its steps were done; ``slowest_s``: the slowest save.

    A damaged checkpoint sends its run back to the one before. What was done while a save was being written, and while the disk
    was full, could not be in any checkpoint; and who is warned then cannot save.
    """
    last = times[-1] if times else 0.0
    unsavable = sum(begin <= t <= end for t in times for begin, end in full) + attempt["steps_unwritten"]
    full_at_end = any(begin <= t <= end + slowest_s for begin, end in full for t in (last, attempt["ended"] or last))
    if attempt["cause"] in WARNED and not damaged and not full_at_end:
        return 0
    return storms.INTERVAL * (1 + damaged) + unsavable + sum(t > last - slowest_s for t in times)


def writers_at_once(night: Night) -> list[tuple[str, str]]:
    """Pairs of attempts of which the later one wrote a metrics line before the earlier one's last."""
    times: dict[str, list[float]] = {}
    for line in night.metrics():
        times.setdefault(line["attempt"], []).append(line["t"])
    ordered = sorted(times.items(), key=lambda item: item[1][0])
    return [(one, other) for (one, a), (other, b) in itertools.pairwise(ordered) if b[0] < a[-1]]


def report(storm: storms.Storm, untouched: dict[int, float], wall_s: float) -> bool:
    """Prints the tables; True when all is well."""
    lost: Counter[str] = Counter()
    attempts: Counter[str] = Counter()
    made, full_steps = 0, 0
    good = True
    print(
        f"\n{sum(storm.faults.values())} faults in {wall_s / 60:.1f} min against {len(storm.nights)} runs of {storm.steps} steps"
    )
    for kind, count in storm.faults.most_common():
        print(f"  {count:4} x {kind}")
    for night in storm.nights:
        wrong = wrong_with(night, untouched, storm.damaged[night.run_id], storm.full)
        for attempt in night.status()["attempts"]:
            attempts[attempt["cause"]] += 1
            lost[attempt["cause"]] += attempt["steps_lost"] or 0
            made += attempt["steps_unwritten"]
        made += len(night.metrics())
        full_steps += sum(begin <= line["t"] <= end for line in night.metrics() for begin, end in storm.full)
        good &= not wrong
        print(f"run {night.run_id}: " + ("; ".join(wrong) if wrong else "COMPLETED, every loss bit-identical"))
    print("steps lost by cause (attempts): " + ", ".join(f"{cause} {lost[cause]} ({n})" for cause, n in attempts.most_common()))
    if storm.full:
        print(f"{full_steps} steps were made in the {sum(end - begin for begin, end in storm.full):.0f} s that the disk was full")
    useful = len(storm.nights) * storm.steps
    print(f"goodput: {useful} of {made} steps made were useful ({100 * useful / max(1, made):.1f} %)")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3, help="at the same time (the testbed has 4 nodes, one kind of run takes 2)")
    parser.add_argument("--steps", type=int, default=400, help="of each run; one that is done is followed by another")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no more faults after so many; the runs then end")
    parser.add_argument("--testbed", type=Path, help="a testbed that is up; without it one is started")
    parser.add_argument("--user", help="who submits; this process's user if not given")
    parser.add_argument("--compare", action="store_true", help="goodput, too, against a plain script and stock submitit")
    args = parser.parse_args()
    with testbed_at(args.testbed, args.user) as testbed:
        good = not args.faults or weather(testbed, args)
        if args.compare:
            steps, interval = goodput.STEPS, goodput.INTERVAL
            good &= goodput.compare(
                testbed, args.user, steps, interval, goodput.schedule(args.seed, goodput.PREEMPTIONS, interval)
            )
    print("all is well" if good else "NOT WELL")
    return 0 if good else 1


def weather(testbed: Testbed, args: argparse.Namespace) -> bool:
    """One storm from its first run to its report; True when all is well."""
    with ExitStack() as stack:
        runs = testbed.shared_folder("chaos")
        stack.enter_context(small_disk(runs, 512))
        begun = time.monotonic()
        storm = storms.Storm(testbed, runs, args.user, random.Random(args.seed), args.steps, lambda line: print(line, flush=True))
        storm.rage(storm.order(args.faults), args.runs, 60 * args.minutes)
        wall_s = time.monotonic() - begun
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="untouched-")))
        good = report(storm, untouched_losses(storm.nights[0], scratch / "run"), wall_s)
        if not good:
            kept = testbed.root / "log" / "runs"
            shutil.copytree(runs, kept, ignore=shutil.ignore_patterns("*.distcp"))  # they lie on a disk that is about to go
            print(f"the runs, without their checkpoints' data, are in {kept}")
    return good


if __name__ == "__main__":
    sys.exit(main())
