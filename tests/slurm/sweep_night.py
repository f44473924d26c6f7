"""A sweep on the testbed in a night in which nodes are taken away again and again, and how it is judged.

For benchmarks/sweep_night.py and its short form in the tests. Most points are a shell script that counts, saves when it is told
to leave, and continues: each start of PyTorch costs a small machine dearly.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcmoe.runs.journal import iter_json_lines
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import Record, read_record
from hpcmoe.runs.sweep import SweepDir
from tests.slurm import testbed_cluster
from tests.slurm.night import hpcmoe
from tests.slurm.testbed_client import Testbed

PARTITION = "requeue_grace"
RAISES = 3  # the point whose script ends with an error
WORDS = "ValueError: 3 is no number that this script counts from"
COUNT = f"""\
# count.sh SEED STEPS PAUSE_S: a training that is nothing but its checkpoint
seed=$1 steps=$2 pause=$3 step=0 value=$1 stop=
state=$HPCMOE_RUN_DIR/checkpoints/count
mkdir -p "${{state%/*}}"
[[ -e $state ]] && read -r step value <"$state"
trap 'stop=1' TERM
save() {{ echo "$step $value" >"$state.new" && mv "$state.new" "$state"; }}
while (( step < steps )); do
  if (( seed == {RAISES} && step == steps / 2 )); then echo "{WORDS}" >&2; exit 7; fi
  (( ++step, value = (value * 1103515245 + 12345 + seed) % 2147483648 ))
  echo "step: $step loss: $value"
  if [[ -n $stop ]]; then save; exit 0; fi
  if [[ $pause != 0 ]]; then sleep "$pause" & wait $!; fi
done
save
"""
COMMON = [
    "cluster=testbed",
    "gpus_per_node=1",
    f"slurm.partition={PARTITION}",
    # more happens to these runs in some minutes than should happen to any in a month
    "resilience.max_preemptions_per_hour=null",
    "resilience.max_attempts_without_progress=1",
    "resilience.failure_backoff_s=0",
    "resilience.exclude_for_s=0",
]
TRAINED_STEPS = 12
TRAINED = [
    *("model=tiny", "model.layers=2", "train.seq_len=64", "train.global_batch_tokens=512", "data.max_bytes=1000000"),
    *("logging.tensorboard=false", "checkpoint.interval=0", f"train.steps={TRAINED_STEPS}"),
]
TOO_FAST = "optim.lr=1e+30"  # the point whose training does not stay finite, as Hydra writes the number
PATIENCE_S = 900.0


@dataclass
class SweepNight:
    """One sweep, and the strikes at it. ``user``: who submits; None: this process's."""

    testbed: Testbed
    runs: Path
    user: str | None
    chance: random.Random
    say: Callable[[str], None]
    steps: int = 40  # of each script
    pause_s: float = 0.2  # of each step
    strikes: list[str] = field(default_factory=list)  # nodes
    sweep_id: str = ""
    submitted: int = 0  # points

    # The sweep

    def hpcmoe(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return hpcmoe(self.testbed, self.runs, self.user, *words, check=check)

    def submit_scripts(self, count: int, *overrides: str) -> None:
        """The sweep's first points: so many scripts, one of which raises."""
        script = self.runs / "count.sh"
        script.write_text(COUNT)
        words = f"[bash,{script},'${{user.seed}}',{self.steps},{self.pause_s}]"
        command = ["engine=command", f"engine.command={words}", "engine.progress='step: (?P<step>[0-9]+) loss: (?P<loss>[0-9]+)'"]
        self._submit(count, *command, f"+user.seed=range({count})", *overrides)

    def add_trained(self, *overrides: str) -> None:
        """Two points more, which train; one with a learning rate at which nothing stays finite."""
        self._submit(2, "--sweep", self.sweep_id, *TRAINED, "optim.lr=1e-3,1e30", "train.skip.most_in_a_row=0", *overrides)

    def _submit(self, count: int, *words: str) -> None:
        told = json.loads(self.hpcmoe("submit", "-m", "--yes", "--json", *COMMON, *words).stdout)
        self.sweep_id, self.submitted = told["sweep_id"], self.submitted + count
        self.say(f"sweep {self.sweep_id}: {count} points submitted")

    @property
    def sweep(self) -> SweepDir:
        return SweepDir(self.runs / "sweeps" / self.sweep_id)

    def records(self) -> dict[int, Record]:
        """By point."""
        sweep = self.sweep
        return {point.index: read_record(sweep.run(point.result_run)) for point in sweep.read_points()}

    def going(self) -> list[Record]:
        return [record for record in self.records().values() if record.finished is None]

    # What happens

    def until(self, what: str, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not happen within {PATIENCE_S:.0f} s\n{self.postmortem()}")
            time.sleep(0.5)

    def busy_nodes(self) -> list[str]:
        """Nodes on which elements train."""
        open_attempts = [record.attempts[-1] for record in self.going() if record.life.open and record.attempts]
        return sorted({host for attempt in open_attempts if attempt.first_step is not None for host in attempt.hosts})

    def strike(self) -> None:
        """Somebody with priority takes a node on which elements train; returns when it is free again."""
        self.until("training", lambda: bool(self.busy_nodes()) or not self.going())
        nodes = self.busy_nodes()
        if not nodes:
            return
        node = self.chance.choice(nodes)
        job = self.testbed.sbatch("#!/bin/sh\n", "-phigh", f"-w{node}", "--exclusive", "-t2", "-o/dev/null")
        self.testbed.wait_for(job, {"COMPLETED"})
        self.strikes.append(node)
        self.say(f"{len(self.strikes):4}. {node} taken away; {self.submitted - len(self.going())} points are over")

    def until_over(self) -> None:
        self.until("every point's end", lambda: not self.going())

    def postmortem(self) -> str:
        parts = [self.hpcmoe("sweep", "status", self.sweep_id, "--all", check=False).stdout]
        parts += [self.testbed.run(["squeue", "-r"]).stdout, self.sweep.events_file.read_text()]
        for record in self.going()[:3]:
            parts += [f"--- run {record.run.run_id}", *(json.dumps(event) for event in record.events)]
            for log in sorted(self.sweep.sbatch.glob("*.log"))[-3:]:
                parts += [f"--- {log}", *log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(parts)


@contextmanager
def small_arrays(testbed: Testbed, most: int) -> Iterator[None]:
    """Slurm takes no array of more elements than ``most``."""
    before = testbed_cluster.load(testbed.root).settings.max_array_size  # type: ignore[union-attr]
    testbed_cluster.set_max_array_size(testbed.root, most)
    try:
        yield
    finally:
        testbed_cluster.set_max_array_size(testbed.root, before)


@dataclass
class Judgement:
    """What should not have been, in words; empty: all is well."""

    night: SweepNight
    scratch: Path  # for runs that nobody touches
    most: int  # elements of an array

    @cached_property
    def records(self) -> dict[int, Record]:
        return self.night.records()

    @cached_property
    def raised(self) -> dict[int, str]:
        """The points that must fail, each with what it must say."""
        overrides = {point.index: point.overrides for point in self.night.sweep.read_points()}
        script = next(index for index, words in overrides.items() if f"+user.seed={RAISES}" in words)
        trained = next((index for index, words in overrides.items() if TOO_FAST in words), None)
        return {script: WORDS} | ({} if trained is None else {trained: "not finite"})

    def wrong(self) -> list[str]:
        found = [] if len(self.records) == self.night.submitted else [f"{len(self.records)} of {self.night.submitted} points"]
        for index, record in self.records.items():
            found += [f"point {index}: {words}" for words in (*self._wrong_with(index, record), *writers_at_once(record))]
        return [*found, *self._slurms(), *self._told(), *self._arrays()]

    def _wrong_with(self, index: int, record: Record) -> Iterator[str]:
        ends = [event for event in record.events if event["event"] == "finished"]
        if len(ends) != 1:
            yield f"has {len(ends)} ends"
        state = record.finished["state"] if record.finished is not None else "not over"
        if state != ("FAILED" if index in self.raised else "COMPLETED"):
            yield f"is {state}"
        causes = {attempt.cause for attempt in record.attempts[:-1]} - {"preempted"}
        if causes - ({"crashed"} if index in self.raised else set()):
            yield f"its attempts ended as {sorted(map(str, causes))}, and nothing but preemptions happened"
        if index not in self.raised and (last := result_of(record)) != (right := self._untouched(record)):
            yield f"ends with {last}, an untouched run with {right}"
        if any(len({line["loss"] for line in again}) > 1 for _, again in by_step(record)):
            yield "made a step again, with another result"

    def _untouched(self, record: Record) -> Any:
        """The result of the same point where nothing happens."""
        scratch = self.scratch / record.run.run_id
        (scratch / "control").mkdir(parents=True)
        if record.planned["engine"] == "command":
            seed = next(word for word in record.run.overrides.read_text().splitlines() if "user.seed=" in word).partition("=")[2]
            words = ["bash", str(self.night.runs / "count.sh"), seed, str(self.night.steps), "0"]
            subprocess.run(words, env={**os.environ, "HPCMOE_RUN_DIR": str(scratch)}, check=True, stdout=subprocess.DEVNULL)
            return (scratch / "checkpoints" / "count").read_text()
        from tests.engine.ranks import Attempt as Ranks

        (scratch / "config.yaml").write_bytes(record.run.config.read_bytes())
        ranks = Ranks(RunDir(scratch), "untouched.0", 1, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
        if any(ranks.finish()):
            raise RuntimeError(ranks.log())
        return losses_of(RunDir(scratch))

    def _slurms(self) -> Iterator[str]:
        """Slurm's own word for every element; its database hears of ends a little later."""
        wanted = {record.job_id: "FAILED" if index in self.raised else "COMPLETED" for index, record in self.records.items()}
        jobs = ",".join(sorted({str(job).partition("_")[0] for job in wanted}))
        found: dict[str, list[str]] = {}
        for _ in range(100):
            rows = self.night.testbed.run(["sacct", "-nXP", "-o", "JobID,State,ExitCode", "-j", jobs]).stdout.splitlines()
            found = {job: [state, code] for job, state, code in (row.split("|") for row in rows)}
            if all(found.get(str(job), ["?"])[0] in ("FAILED", "COMPLETED", "TIMEOUT") for job in wanted):
                break
            time.sleep(0.2)
        late = {record.job_id for record in self.records.values() if ended_while_preempted(record)}
        for job, state in wanted.items():
            state_there, code = found.get(str(job), ["unknown", ""])
            if job in late and (state, state_there, code) == ("COMPLETED", "TIMEOUT", "0:0"):
                continue  # it was done a moment after its grace time: Slurm takes that for its time limit
            if state_there != state or (code == "0:0") != (state == "COMPLETED"):
                yield f"job {job} is {state_there} {code} in Slurm, and should be {state}"

    def _told(self) -> Iterator[str]:
        """What the command line says of it."""
        waited = self.night.hpcmoe("sweep", "wait", self.night.sweep_id, check=False)
        if waited.returncode != 1:
            yield f"`sweep wait` exits with {waited.returncode}: {waited.stderr}"
        for verb in ("status", "results"):
            points = json.loads(self.night.hpcmoe("sweep", verb, self.night.sweep_id, "--json").stdout)["points"]
            failed = {
                point["point"]: f"{point['reason']} {point['last_error']}" for point in points if point["state"] == "FAILED"
            }
            if failed.keys() != self.raised.keys():
                yield f"`sweep {verb}` has the points {sorted(failed)} as FAILED"
            yield from (
                f"`sweep {verb}` says of point {index}: {words}"
                for index, words in failed.items()
                if self.raised.get(index, words) not in words
            )
            if len(points) != self.night.submitted or {point["state"] for point in points} != {"COMPLETED", "FAILED"}:
                yield f"`sweep {verb}` has {Counter(point['state'] for point in points)}"

    def _arrays(self) -> Iterator[str]:
        """Every point was an element once, of an array that Slurm takes."""
        submitted = [event["points"] for event in self.night.sweep.read_events() if event["event"] == "array_submitted"]
        if any(len(points) > self.most for points in submitted):
            yield f"arrays of {[len(points) for points in submitted]} elements"
        if sorted(itertools.chain.from_iterable(submitted)) != sorted(self.records):
            yield f"points were submitted as {submitted}"

    def preempted(self) -> int:
        """Attempts."""
        return sum(attempt.cause == "preempted" for record in self.records.values() for attempt in record.attempts)


def ended_while_preempted(record: Record) -> bool:
    """Its last attempt was being taken away when it was done."""
    last = [event for event in record.events if event["event"] == "attempt_ended"][-1:]
    return any(event.get("preempt_time") is not None for event in last)


def by_step(record: Record) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    lines = sorted(record.metrics, key=lambda line: line["step"])
    return ((step, list(group)) for step, group in itertools.groupby(lines, key=lambda line: line["step"]))


def losses_of(run: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in iter_json_lines(run.metrics)}


def result_of(record: Record) -> Any:
    """A script's is its last checkpoint, a training's all of its losses."""
    if record.planned["engine"] == "command":
        return (record.run.checkpoints / "count").read_text()
    return losses_of(record.run)


def writers_at_once(record: Record) -> list[str]:
    """Attempts of which the later one wrote a metrics line before the earlier one's last."""
    times: dict[str, list[float]] = {}
    for line in record.metrics:
        times.setdefault(line["attempt"], []).append(line["t"])
    ordered = sorted(times.items(), key=lambda item: item[1][0])
    return [f"{one} and {two} wrote at once" for (one, a), (two, b) in itertools.pairwise(ordered) if b[0] < a[-1]]


def rage(night: SweepNight, strikes: Sequence[float]) -> None:
    """Strike so many seconds after each strike before; then until every point is over."""
    for pause_s in strikes:
        time.sleep(pause_s)
        if night.going():
            night.strike()
    night.until_over()
