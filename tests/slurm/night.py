"""A run on the testbed, and the things that can happen to it in a night. For the tests of this folder; asserts nothing itself."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from hpcmoe.runs.journal import iter_json_lines, read_journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import read_record
from tests.slurm.testbed_client import Testbed

ALL_NIGHTS = os.environ.get("HPCMOE_ALL_NIGHTS") == "1"
STEPS = 60
SOME_STEPS = 2
STOP_LEAD_S = 120
RANKS_PER_NODE = 4 if ALL_NIGHTS else 1  # each rank's start costs two cores dearly; EXAMPLE has four on each node
RUN = [
    "model=tiny",
    "model.layers=2",
    "cluster=testbed",
    "nodes=2",
    f"gpus_per_node={RANKS_PER_NODE}",
    "train.seq_len=64",
    "train.global_batch_tokens=512",
    "logging.tensorboard=false",
    "checkpoint.interval=20",
    f"layout.ep={min(4, 2 * RANKS_PER_NODE)}",
]


# The layout that everyone asks for first, on all nodes of the testbed, with small dimensions.
EXAMPLE = [
    "model=moe_32x4096",
    *(f"model.{name}" for name in ("hidden=64", "layers=4", "heads=4", "kv_heads=2", "head_dim=16", "expert_ffn=64")),
    "model.vocab_size=272",
    "cluster=testbed",
    "nodes=4",
    "gpus_per_node=4",
    *(f"layout.{name}" for name in ("tp=2", "pp=2", "ep=4", "dp_shard=4", "microbatch=1")),
    "train.seq_len=32",
    "train.global_batch_tokens=256",
    "logging.tensorboard=false",
]


@dataclass(frozen=True)
class Night:
    """One run, submitted through the command line as ``user`` (None: as root)."""

    testbed: Testbed
    runs: Path
    user: str | None
    run_id: str
    job_id: str

    @property
    def dir(self) -> Path:
        return self.runs / self.run_id

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_journal(self.dir / "events.jsonl") if event["event"] == name]

    def metrics(self) -> list[dict[str, Any]]:
        return list(iter_json_lines(self.dir / "metrics.jsonl"))

    def losses(self) -> dict[int, set[float]]:
        """Every loss that was ever written for a step: one value, however often the step was done."""
        found: dict[int, set[float]] = {}
        for line in self.metrics():
            found.setdefault(line["step"], set()).add(line["loss"])
        return found

    def step(self) -> int:
        return max((line["step"] for line in self.metrics()), default=0)

    def hpcmoe(self, *words: str, check: bool = True) -> CompletedProcess[str]:
        return hpcmoe(self.testbed, self.runs, self.user, *words, check=check)

    def status(self) -> dict[str, Any]:
        return json.loads(self.hpcmoe("status", self.run_id, "--json").stdout)

    def until(self, what: str, true: Callable[[], bool], timeout: float = 300.0) -> None:
        """Wait until ``true``; when it never comes, say what the run looked like."""
        deadline = time.monotonic() + timeout
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not happen within {timeout:.0f} s\n{self.postmortem()}")
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: self.step() >= step)

    @property
    def attempt(self) -> str:
        """The newest attempt."""
        return str(self.events("attempt_started")[-1]["attempt"])

    @contextmanager
    def in_the_middle_of_a_step(self) -> Iterator[Callable[[], None]]:
        """What happens in this block happens after some steps of the newest attempt, while the ranks make another one.

        Rank 0 is frozen for it, so that neither a fast nor a busy machine changes what is tested; where time runs out before the
        first step there is nothing to freeze. The block may call what it is handed: it waits until the run has been told to go.
        """
        attempt = self.attempt
        notice = self.dir / "attempts" / attempt / "notice"

        def under_way() -> bool:
            return notice.exists() or sum(line["attempt"] == attempt for line in self.metrics()) >= SOME_STEPS

        self.until(f"{SOME_STEPS} steps of attempt {attempt}", under_way)
        pid = 0 if notice.exists() else self.rank_pid(0)
        if pid:
            os.kill(pid, signal.SIGSTOP)
        try:
            # Slurm itself wakes what it sends SIGTERM
            yield lambda: self.until("word to the run", lambda: notice.exists() or not _frozen(pid))
        finally:
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def until_state(self, *states: str, timeout: float = 1200.0) -> dict[str, Any]:
        """Wait until the run's journal says that it is in one of these (final) states; returns what `status` then says."""

        def reached() -> bool:
            ended = read_record(RunDir(self.dir)).finished
            return ended is not None and ended["state"] in states

        self.until(f"state {' or '.join(states)}", reached, timeout)
        return self.status()

    def postmortem(self) -> str:
        parts = [self.hpcmoe("status", self.run_id, check=False).stdout]
        parts += [json.dumps(event) for event in read_journal(self.dir / "events.jsonl")]
        for log in sorted(self.dir.glob("sbatch/*.log")) + sorted(self.dir.glob("attempts/*/rank-0000.log")):
            parts += [f"--- {log}", *log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(parts)

    def ended_attempts(self) -> int:
        return len(self.events("attempt_ended"))

    def started_attempts(self) -> int:
        return len(self.events("attempt_started"))

    def until_return(self, started: int, timeout: float = 300.0) -> None:
        """Wait for an attempt after the first ``started`` ones, or for the end of the run."""
        self.until("the run's return", lambda: self.started_attempts() > started or bool(self.events("finished")), timeout)

    # What can happen

    def preempt(self) -> None:
        """Somebody with priority takes the run's nodes for a moment; returns when the run is back."""
        before = self.started_attempts()
        nodes = ",".join(self.events("attempt_started")[-1]["hosts"])
        with self.in_the_middle_of_a_step() as until_told:
            high = self.testbed.sbatch("#!/bin/sh\n", "-phigh", f"-w{nodes}", "--exclusive", "-t2", "-o/dev/null")
            until_told()
        self.testbed.wait_for(high, {"COMPLETED"})
        self.until_return(before)

    def kill_rank(self, rank: int) -> None:
        """SIGKILL, as the out-of-memory killer does it."""
        before = self.started_attempts()
        with self.in_the_middle_of_a_step():
            os.kill(self.rank_pid(rank), signal.SIGKILL)
        self.until_return(before)

    def stop_by_file(self) -> None:
        """What a colleague does who needs the nodes."""
        with self.in_the_middle_of_a_step():
            (self.dir / "control" / "stop").touch()

    def rank_pid(self, rank: int) -> int:
        """The process of a rank on this machine, by what stands in its environment."""
        attempt = self.attempt
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environ = dict(part.split("=", 1) for part in (entry / "environ").read_text().split("\0") if "=" in part)
                words = (entry / "cmdline").read_text().split("\0")
            except (OSError, UnicodeDecodeError):
                continue
            # srun names the engine in its words too, and has the batch shell's SLURM_PROCID, which is 0
            engine = "hpcmoe.engine" in words and "srun" not in words[0]
            if engine and environ.get("HPCMOE_ATTEMPT") == attempt and environ.get("SLURM_PROCID") == str(rank):
                return int(entry.name)
        raise AssertionError(f"no process is rank {rank} of attempt {attempt}")

    def outlast_time_limit(self) -> None:
        """A step that lasts until Slurm says that time runs out, of a job whose limit is as near as its warning allows.

        The limit is set by hand once the run is under way, and lifted for the next attempt: on a busy machine a start may take
        longer than any limit that this test has the patience to wait for.
        """
        before, ended = self.started_attempts(), self.ended_attempts()
        with self.in_the_middle_of_a_step() as until_told:
            limit = f"EndTime=now+{STOP_LEAD_S + 30}"  # Slurm looks every 30 s, and warns 30 s early rather than late
            self.testbed.run(["scontrol", "update", f"JobId={self.job_id}", limit], check=True)
            until_told()
        self.until("the attempt's end", lambda: self.ended_attempts() > ended)
        self.testbed.run(["scontrol", "update", f"JobId={self.job_id}", "TimeLimit=30"], check=True)
        self.until_return(before)

    def admin_requeue(self) -> None:
        before = self.started_attempts()
        with self.in_the_middle_of_a_step() as until_told:
            self.testbed.run(["scontrol", "requeue", self.job_id], check=True)  # as root, who is the testbed's administrator
            until_told()
        self.until_return(before)


def _frozen(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def hpcmoe(testbed: Testbed, runs: Path, user: str | None, *words: str, check: bool = True) -> CompletedProcess[str]:
    """`hpcmoe WORDS`, as a person at a login node."""
    done: CompletedProcess[str] = testbed.run(
        [sys.executable, "-m", "hpcmoe", *words], user=user, env={"HPCMOE_RUNS": str(runs)}, cwd=str(runs), check=False
    )
    if check and done.returncode != 0:
        raise AssertionError(f"hpcmoe {' '.join(words)} -> {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def begin(testbed: Testbed, runs: Path, user: str | None, *overrides: str, run: Sequence[str] = RUN, steps: int = STEPS) -> Night:
    """Submit the run and return at once."""
    out = json.loads(hpcmoe(testbed, runs, user, "submit", *run, f"train.steps={steps}", *overrides, "--json").stdout)
    return Night(testbed, runs, user, out["run_id"], out["job_id"])
