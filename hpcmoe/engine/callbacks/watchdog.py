"""A hang becomes a crash that says who was waited for: signs of life, all ranks' stacks, one line, an exit code.

A thread of each rank looks at its own loop. The lowest living rank reports; the others leave once it has.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from hpcmoe.engine import hang
from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.callback import NOTHING, Callback, Phase, Told
from hpcmoe.engine.flight import dump_collectives
from hpcmoe.files import read_json, write_json
from hpcmoe.runs.journal import PatientJournal
from hpcmoe.runs.rundir import RunDir

LONGEST_PERIOD_S = 10.0
LOOKS = 4  # periods between two looks at the others: who gives no sign in them is silent
DUMP_S = 10.0
PATIENCE = 4 * LOOKS  # periods that a rank waits for the reporting one


class Watchdog(Callback):
    """``timeout_s`` holds inside a step and ``startup_timeout_s`` before the first is done and while a checkpoint is written."""

    name = "watchdog"

    def __init__(
        self,
        run: RunDir,
        attempt: str,
        rank: int,
        ranks: int,
        timeout_s: float,
        startup_timeout_s: float,
        leave: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.attempt, self.rank, self.ranks, self.leave, self.clock = run, attempt, rank, ranks, leave, clock
        self.timeout_s, self.startup_timeout_s = timeout_s, startup_timeout_s
        self.period = min(LONGEST_PERIOD_S, timeout_s / 20)
        self.folder = run.heartbeats(attempt)
        self._step, self._moved = 0, self.clock()
        self._phase: Phase = "rendezvous"
        self._warm = False  # a whole step was done
        self._count = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def entering(self, step: int, phase: Phase) -> None:
        self._step, self._phase, self._moved = step, phase, self.clock()

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        self._warm = True
        return NOTHING

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        last = self.clock()
        while not self._closed.wait(self.period):
            now = self.clock()
            if now - last > LOOKS * self.period:
                self._moved = now  # the whole process stood still: suspended with its job, perhaps, and so were the others
            last = now
            self._beat()
            if self.run.hang(self.attempt).exists():
                self._write_stacks()
                self._leave()
                return
            if now - self._moved > self._limit():
                if self._hung():
                    return
                last = self.clock()

    def _limit(self) -> float:
        return self.timeout_s if self._warm and self._phase != "save" else max(self.timeout_s, self.startup_timeout_s)

    def _beat(self) -> None:
        self._count += 1
        try:
            hang.write_beat(self.folder, self.rank, hang.Beat(self._step, self._phase, self._count))
        except OSError as error:
            print(f"watchdog: no sign of life could be written: {error}", file=sys.stderr, flush=True)

    def _hung(self) -> bool:
        """See who lives; report, or wait for the report, and leave. False if the loop moved on meanwhile."""
        stuck_since = self._moved
        before = hang.read_beats(self.folder, self.ranks)
        for _ in range(LOOKS):
            time.sleep(self.period)
            self._beat()
        beats = hang.read_beats(self.folder, self.ranks)
        if self._moved != stuck_since:
            return False
        silent = hang.silent_ranks(before, beats) - {self.rank}
        self._write_stacks()
        if self.rank == min(set(beats) - silent):
            self._report(hang.diagnose(beats, silent, self.clock() - stuck_since))
        else:
            self._await_report()
        self._leave()
        return True

    def _report(self, diagnosis: hang.Diagnosis) -> None:
        """The file comes last: the others leave when it is there, and the job with them."""
        PatientJournal(self.run.journal, self.attempt).append("hang", **diagnosis.as_json())
        print(
            f"rank {self.rank}: hang: {diagnosis.text}; stacks are in {self.run.attempt(self.attempt)}",
            file=sys.stderr,
            flush=True,
        )
        try:
            write_json(self.run.hang(self.attempt), diagnosis.as_json())
        except OSError as error:  # the others wait for it in vain, but not for ever
            print(f"watchdog: {self.run.hang(self.attempt)} could not be written: {error}", file=sys.stderr, flush=True)

    def _await_report(self) -> None:
        for _ in range(PATIENCE):
            if read_json(self.run.hang(self.attempt)) is not None:
                return
            time.sleep(self.period)
            self._beat()

    def _write_stacks(self) -> None:
        """Where every thread stands."""
        path = self.run.attempt(self.attempt) / f"stacks-rank{self.rank:04d}.txt"
        try:
            with path.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            print(f"watchdog: {path} could not be written: {error}", file=sys.stderr, flush=True)

    def _leave(self) -> None:
        """After the others had time for their stacks: the first rank that goes takes the job with it."""
        folder = self.run.attempt(self.attempt)
        dump = threading.Thread(target=dump_collectives, args=(folder, self.rank), daemon=True)  # a driver that hangs may hold it
        dump.start()
        time.sleep(LOOKS * self.period)
        dump.join(DUMP_S)
        self.leave(hang.EXIT_CODE)
