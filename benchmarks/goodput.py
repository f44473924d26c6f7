"""How much of the work counts, when the queue takes the machine away again and again? Three ways to keep one training going.

    python benchmarks/goodput.py [--user NAME]     # as root, with Slurm's packages: starts a testbed and stops it

The ways: hpcmoe; a job script that saves every so many steps and requeues itself; stock submitit (benchmarks/plain_ways.py has
both). The same config, engine, interval of checkpoints, and preemptions: the k-th strikes when the k-th attempt has made as many
steps as the seed says. In partitions with and without a grace time, both with PreemptMode=REQUEUE.

What is handicapped, and how: the training of the two plain ways hears no signal, so it loses what it had not saved; that is the
point. The site sends the job's own signal with the preemption, which is what submitit waits for. Slurm holds a requeued job for
AuthInfo=cred_expire + 1 s, 121 s by default, here 6 s: that is in favour of the plain ways, as hpcmoe lifts the hold. The model
is tiny, so that starts are most of the time: of the figures over wall time the differences say more than the levels.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.on_testbed import testbed_at
from hpcmoe.runs.journal import iter_json_lines
from hpcmoe.runs.story import goodput_of
from tests.slurm import storm
from tests.slurm.night import begin
from tests.slurm.testbed_client import Testbed

HPCMOE, SCRIPT, SUBMITIT = "hpcmoe", "script", "submitit"
PARTITIONS = {"with grace": "requeue_grace", "without grace": "requeue_nograce"}
STEPS, INTERVAL, PREEMPTIONS = 400, 50, 3
PATIENCE_S = 300.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")


@dataclass(frozen=True)
class Result:
    """One training under one way. Times are seconds."""

    way: str
    preemption: str
    finished: bool
    attempts: int
    useful_steps: int
    all_steps: int
    useful_s: float  # that the useful steps took
    wall_s: float  # from the first step's begin to the last one's end

    @property
    def of_steps(self) -> float:
        return self.useful_steps / self.all_steps if self.all_steps else 0.0

    @property
    def of_wall(self) -> float:
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    @property
    def steps_a_minute(self) -> float:
        """Useful ones."""
        return 60 * self.useful_steps / self.wall_s if self.wall_s else 0.0


def result_of(way: str, preemption: str, metrics: Sequence[dict], steps: int) -> Result:
    """From what the engine wrote of each step. A step that a later attempt did again is useful once."""
    goodput = goodput_of([], metrics, 0.0)
    return Result(
        way=way,
        preemption=preemption,
        finished=bool(metrics) and metrics[-1]["step"] == steps,
        attempts=len({line["attempt"] for line in metrics}),
        useful_steps=goodput.useful_steps,
        all_steps=goodput.all_steps,
        useful_s=goodput.useful_s,
        wall_s=metrics[-1]["t"] - metrics[0]["t"] + metrics[0]["seconds"] if metrics else 0.0,
    )


@dataclass(frozen=True)
class Trial:
    """A training on the testbed, and what happens to it."""

    testbed: Testbed
    job_id: str
    run_dir: Path
    steps: int

    def metrics(self) -> list[dict]:
        return list(iter_json_lines(self.run_dir / "metrics.jsonl"))

    def over(self) -> bool:
        return any(line["step"] == self.steps for line in self.metrics()[-1:]) or self._job_ended()

    def _job_ended(self) -> bool:
        """And stays so: a job that is about to be requeued may look like it, too."""
        for _ in range(5):
            if self.testbed.state(self.job_id) not in ENDED:
                return False
            time.sleep(1)
        return True

    def until(self, what: str, true: Callable[[], bool]) -> bool:
        """False if the training is over before."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            if self.over():
                return False
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come within {PATIENCE_S:.0f} s: {self.testbed.show(self.job_id)}")
            time.sleep(0.2)
        return True

    def preempt(self, after: int) -> bool:
        """When an attempt that was not preempted yet has made ``after`` steps. False if the training was over before."""
        seen = self.testbed.show(self.job_id).get("Restarts")

        def far_enough() -> bool:
            lines = self.metrics()
            attempt = lines[-1]["attempt"] if lines else ""
            return attempt.endswith(f".{seen}") and sum(line["attempt"] == attempt for line in lines) >= after

        if not self.until(f"step {after} of start {seen}", far_enough):
            return False
        node = self.testbed.show(self.job_id)["NodeList"]
        high = self.testbed.sbatch("#!/bin/sh\n", "-phigh", f"-w{node}", "--exclusive", "-t2", "-o/dev/null")
        self.testbed.wait_for(high, {"COMPLETED"})
        return self.until("the requeue", lambda: self.testbed.show(self.job_id).get("Restarts") != seen)

    def see_through(self, strikes: Sequence[int]) -> None:
        for after in strikes:
            if not self.preempt(after):
                break
        self.until("the end", self.over)


@dataclass(frozen=True)
class Place:
    """Where the trainings run, who submits them, and what they are."""

    testbed: Testbed
    runs: Path
    user: str | None
    steps: int
    interval: int  # of checkpoints, steps

    def hpcmoe(self, partition: str) -> Trial:
        run = [word for word in storm.RUN if not word.startswith("checkpoint.interval")]
        run += ["nodes=1", "gpus_per_node=2", f"slurm.partition={partition}", f"checkpoint.interval={self.interval}"]
        night = begin(self.testbed, self.runs, self.user, run=run, steps=self.steps)
        return Trial(self.testbed, night.job_id, night.dir, self.steps)

    def plain(self, way: str, partition: str, config: Path) -> Trial:
        """``config``: that of a run of hpcmoe's."""
        folder = self.runs / f"{way}-{partition}"
        words = [sys.executable, str(Path(__file__).with_name("plain_ways.py")), way, str(config), str(folder), partition]
        done = self.testbed.run(words, self.user, cwd=str(self.runs))
        if done.returncode:
            raise AssertionError(f"{way} could not be submitted: {done.stderr}")
        return Trial(self.testbed, done.stdout.split()[-1], folder, self.steps)


def compare(testbed: Testbed, user: str | None, steps: int, interval: int, strikes: Sequence[int]) -> bool:
    """Prints the table; True if hpcmoe's trainings were finished, and all ways made the same losses."""
    place = Place(testbed, testbed.shared_folder("goodput"), user, steps, interval)
    testbed.set_user_signal(True)
    results: list[Result] = []
    losses: set[tuple[int, float]] = set()
    print(f"{steps} steps, a checkpoint every {interval}, preempted after {', '.join(map(str, strikes))} steps of an attempt")
    for preemption, partition in PARTITIONS.items():
        own = place.hpcmoe(partition)
        trials = {HPCMOE: own} | {way: place.plain(way, partition, own.run_dir / "config.yaml") for way in (SCRIPT, SUBMITIT)}
        with ThreadPoolExecutor(len(trials)) as pool:  # at the same time, on a node each: all find the same machine
            list(pool.map(lambda trial: trial.see_through(strikes), trials.values()))
        for way, trial in trials.items():
            metrics = trial.metrics()
            results.append(result_of(way, preemption, metrics, steps))
            losses |= {(line["step"], line["loss"]) for line in metrics}
            testbed.run(["scancel", trial.job_id])
            print(f"  {way}, {preemption}: {results[-1].useful_steps} of {results[-1].all_steps} steps useful", flush=True)
    print(table(results))
    same = len(losses) == steps
    print("every step's loss is the same in all of them" if same else f"{len(losses)} losses of {steps} steps: they DIFFER")
    return same and all(result.finished for result in results if result.way == HPCMOE)


def table(results: Sequence[Result]) -> str:
    """Ratios are to hpcmoe's under the same preemptions."""
    head = ("preemptions", "way", "useful of all steps", "share", "min", "share of time", "useful steps/min", "of hpcmoe's")
    lines = ["{:14} {:9} {:>19} {:>7} {:>5} {:>13} {:>16} {:>11}".format(*head)]
    for one in results:
        own = next((other for other in results if other.way == HPCMOE and other.preemption == one.preemption), one)
        ratio = one.steps_a_minute / own.steps_a_minute if own.steps_a_minute else 0.0
        lines.append(
            f"{one.preemption:14} {one.way:9} {f'{one.useful_steps} of {one.all_steps}':>19} {one.of_steps:>7.1%} "
            f"{one.wall_s / 60:>5.1f} {one.of_wall:>13.1%} {one.steps_a_minute:>16.0f} {ratio:>11.2f}"
            + ("" if one.finished else f"  NOT FINISHED after {one.attempts} attempts")
        )
    return "\n".join(lines)


def schedule(seed: int, preemptions: int, interval: int) -> list[int]:
    """Steps that an attempt makes until it is preempted: anywhere in the two intervals after its first half one."""
    chance = random.Random(seed)
    return [interval // 2 + chance.randrange(2 * interval) for _ in range(preemptions)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--user", help="who submits; this process's user if not given")
    parser.add_argument("--testbed", type=Path, help="a testbed that is up; without it one is started")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--interval", type=int, default=INTERVAL, help="of checkpoints, steps")
    parser.add_argument("--preemptions", type=int, default=PREEMPTIONS, help="of each training")
    args = parser.parse_args()
    with testbed_at(args.testbed, args.user) as testbed:
        strikes = schedule(args.seed, args.preemptions, args.interval)
        return 0 if compare(testbed, args.user, args.steps, args.interval, strikes) else 1


if __name__ == "__main__":
    sys.exit(main())
