"""Faults for runs on the testbed, one after the other and of every kind, until as many have happened as were asked for.

For benchmarks/chaos.py and its short form in the tests. Injects and waits; judges nothing.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import read_record
from tests.slurm import testbed_cluster
from tests.slurm.night import Night, begin
from tests.slurm.testbed_client import Testbed

INTERVAL = 20  # checkpoint.interval, steps
RUN = [
    *("model=tiny", "model.layers=2", "cluster=testbed", "train.seq_len=64", "train.global_batch_tokens=512", "layout.ep=2"),
    *("logging.tensorboard=false", f"checkpoint.interval={INTERVAL}", "data.max_bytes=1000000", "slurm.exclusive=true"),
    # more happens to these runs in an hour than should happen to any in a month
    *(
        "resilience.max_attempts_without_progress=20",
        "resilience.failure_backoff_s=0",
        "resilience.max_preemptions_per_hour=null",
    ),
    "resilience.exclude_for_s=0",  # four nodes would soon be none
]
# What runs at the same time: on disjoint nodes, each in a partition with its own way to preempt, and of two ranks.
KINDS_OF_RUN = (
    ("nodes=2", "gpus_per_node=1", "slurm.partition=requeue_grace"),
    ("nodes=1", "gpus_per_node=2", "slurm.partition=cancel_grace"),
    ("nodes=1", "gpus_per_node=2", "slurm.partition=requeue_nograce"),
    ("nodes=1", "gpus_per_node=2", "slurm.partition=requeue_grace", "slurm.requeue=false"),
)
STEPS_BETWEEN = 3  # an attempt makes so many steps before something happens to its run again
PATIENCE_S = 600.0  # for a run to get there
OUTAGE_S = 10.0  # of a daemon, of free disk space


@dataclass
class Storm:
    """Several runs, two supervisors, and what happens to them. ``faults`` counts by kind."""

    testbed: Testbed
    runs: Path
    user: str | None
    chance: random.Random
    steps: int
    say: Callable[[str], None]
    faults: Counter[str] = field(default_factory=Counter)
    nights: list[Night] = field(default_factory=list)
    damaged: Counter[str] = field(default_factory=Counter)  # checkpoints made unreadable, by run
    struck: dict[str, str] = field(default_factory=dict)  # of each run, the attempt that is ending by a fault
    full: list[tuple[float, float]] = field(default_factory=list)  # when the disk was full, epoch s

    # The runs

    def submit(self, kind: Sequence[str]) -> None:
        self.nights.append(begin(self.testbed, self.runs, self.user, *kind, run=RUN, steps=self.steps))
        self.say(f"run {self.nights[-1].run_id}: {' '.join(kind)}")

    def ended(self, night: Night) -> bool:
        return read_record(RunDir(night.dir)).finished is not None

    def going(self) -> list[Night]:
        return [night for night in self.nights if not self.ended(night)]

    def victims(self) -> list[Night]:
        """Runs whose newest attempt trains, and has done so for some steps."""
        found = []
        for night in self.going():
            attempts = read_record(RunDir(night.dir)).attempts
            newest = attempts[-1] if attempts else None
            if newest is None or not newest.open or newest.first_step is None or newest.last_step is None:
                continue
            if newest.attempt == self.struck.get(night.run_id):
                continue
            if newest.last_step - newest.first_step >= STEPS_BETWEEN and newest.last_step < self.steps - STEPS_BETWEEN:
                found.append(night)
        return found

    # What can happen: each returns when it has happened

    def preempt(self, night: Night) -> None:
        """Somebody with priority takes the run's nodes for a moment; the site may or may not send the job's own signal."""
        self._strike(night)
        self.testbed.set_user_signal(self.chance.random() < 0.5)
        nodes = ",".join(self._hosts(night))
        self.testbed.sbatch("#!/bin/sh\n", "-phigh", f"-w{nodes}", "--exclusive", "-t2", "-o/dev/null")

    def kill_rank(self, night: Night) -> None:
        self._strike(night)
        os.kill(night.rank_pid(self.chance.randrange(2)), signal.SIGKILL)

    def kill_node(self, night: Night) -> None:
        self._strike(night)
        node = self.chance.choice(self._hosts(night))
        testbed_cluster.kill_node(self.testbed.root, node)
        settings = testbed_cluster.load(self.testbed.root).settings  # type: ignore[union-attr]
        night.until(f"node {node} to be seen as dead", lambda: "down" in testbed_cluster.node_states(settings).get(node, "down"))
        testbed_cluster.start_daemon(self.testbed.root, f"slurmd.{node}")

    def requeue(self, night: Night) -> None:
        """By an administrator. Slurm refuses it for a job that forbids it, which is no fault then."""
        self._strike(night)
        job_id = str(read_record(RunDir(night.dir)).job_id)
        if self.testbed.show(job_id).get("Requeue") == "1":
            self.testbed.run(["scontrol", "requeue", job_id], check=True)
        else:
            self.testbed.run(["scancel", "--signal=USR2", job_id], check=True)

    def damage_checkpoint(self, night: Night) -> None:
        """One byte of the newest checkpoint is another, and the run must start again."""
        newest = max(night.dir.glob("checkpoints/step-*"), default=None)
        files = sorted(newest.glob("*.distcp")) if newest is not None else []
        if files:
            with self.chance.choice(files).open("r+b") as file:
                file.seek(self.chance.randrange(os.fstat(file.fileno()).st_size))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 255]))
            self.damaged[night.run_id] += 1
        self.kill_rank(night)

    def stop_controller(self, night: Night) -> None:
        """slurmctld is away for a while, and meanwhile a rank dies: nobody can be asked why, nor to requeue."""
        with self._away("slurmctld"):
            if self.chance.random() < 0.5:
                self.kill_rank(night)

    def stop_accounting(self, night: Night) -> None:
        """slurmdbd is away for a while, and meanwhile the run is preempted."""
        with self._away("slurmdbd"):
            self.preempt(night)

    def kill_supervisor(self, night: Night) -> None:
        victim = next(one for one in self._supervisors if one.poll() is None)  # the other may have found this one there and left
        victim.kill()
        victim.wait()
        self._supervisors[self._supervisors.index(victim)] = self._supervisor()

    def fill_disk(self, night: Night) -> None:
        """The runs' file system is full for a while. Only where it is one of its own (a mount): others live on the machine's."""
        filler, begun = self.runs / ".filler", time.time()
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        time.sleep(OUTAGE_S)
        filler.unlink()
        self.full.append((begun, time.time()))

    def _strike(self, night: Night) -> None:
        self.struck[night.run_id] = night.attempt

    @contextmanager
    def _away(self, daemon: str) -> Iterator[None]:
        testbed_cluster.stop_daemon(self.testbed.root, daemon)
        try:
            yield
            time.sleep(OUTAGE_S)
        finally:
            testbed_cluster.start_daemon(self.testbed.root, daemon)

    def _hosts(self, night: Night) -> list[str]:
        return list(read_record(RunDir(night.dir)).attempts[-1].hosts)

    # The night

    def kinds(self) -> dict[str, Callable[[Night], None]]:
        """What can happen here, by its name."""
        found: dict[str, Callable[[Night], None]] = {
            "preemption": self.preempt,
            "rank killed": self.kill_rank,
            "node died": self.kill_node,
            "requeued by an administrator": self.requeue,
            "checkpoint damaged": self.damage_checkpoint,
            "slurmctld away": self.stop_controller,
            "slurmdbd away": self.stop_accounting,
            "supervisor killed": self.kill_supervisor,
        }
        if os.path.ismount(self.runs):
            found["disk full"] = self.fill_disk
        return found

    def rage(self, faults: Sequence[str], at_once: int, most_s: float = math.inf) -> None:
        """Until these faults have happened, or ``most_s`` seconds are over; then until every run is over.

        ``at_once``: how many runs go on meanwhile.
        """
        kinds, deadline = self.kinds(), time.monotonic() + most_s
        self._supervisors = [self._supervisor(), self._supervisor()]
        try:
            for number in range(at_once):
                self.submit(KINDS_OF_RUN[number % len(KINDS_OF_RUN)])
            for kind in faults:
                if time.monotonic() > deadline:
                    self.say("the time for faults is over")
                    break
                night = self._next_victim(at_once)
                self.say(f"{sum(self.faults.values()) + 1:4}. {kind}: run {night.run_id} at step {night.step()}")
                kinds[kind](night)
                self.faults[kind] += 1
            for night in self.nights:
                night.until("the end", lambda night=night: self.ended(night), PATIENCE_S)  # type: ignore[misc]
        finally:
            for supervisor in self._supervisors:
                supervisor.terminate()
                supervisor.wait()

    def order(self, faults: int) -> list[str]:
        """Every kind as often as every other, within one; preemptions twice as often."""
        deck: list[str] = []
        while len(deck) < faults:
            hand = [*self.kinds(), "preemption"]
            self.chance.shuffle(hand)
            deck += hand
        return deck[:faults]

    def _next_victim(self, at_once: int) -> Night:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.victims()):
            if time.monotonic() > deadline:
                raise AssertionError("no run makes steps any more\n" + "\n".join(n.postmortem() for n in self.going()))
            if len(self.going()) < at_once:
                self.submit(KINDS_OF_RUN[len(self.nights) % len(KINDS_OF_RUN)])
            time.sleep(0.5)
        return self.chance.choice(found)

    def _supervisor(self) -> subprocess.Popen[bytes]:
        log = self.runs / "supervise.log"
        words = [sys.executable, "-m", "hpcmoe", "supervise", "--interval", "5"]
        return self.testbed.start(words, self.user, log, env={"HPCMOE_RUNS": str(self.runs)}, cwd=str(self.runs))
