"""``python -m hpcmoe.engine.command RUN_DIR``: one task of a run that trains with a command of the user's (``engine=command``).

Starts it in a process group of its own, tells it to leave when the run is told so, and says how it ended as a rank of our own
engine does. Stdlib and the frozen config only: no torch. How the command saves and continues is its own business
(docs/engines.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcmoe.config.freeze import load_frozen
from hpcmoe.config.schema import Config, EngineConfig
from hpcmoe.engine.launch import Launch, check_world, read_launch
from hpcmoe.engine.progress import LogProgress
from hpcmoe.engine.stop import ControlFiles, StopSignals
from hpcmoe.engine.verdict import Source, Word, write_error_text, write_verdict
from hpcmoe.errors import UserError
from hpcmoe.files import tail_lines
from hpcmoe.runs.journal import read_journal
from hpcmoe.runs.rundir import RunDir

LOOKS_PER_S = 50.0  # of all ranks together, at two files of a file system that may be slow
LEFTOVER_S = 5.0  # what a command leaves running when it ends by itself is told to go, and gets so long
GROUP_POLL_S = 0.1
LOG_SETTLES_S = 0.2  # between a command's end and its last words in the log, which Slurm writes
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

Asked = Literal["signal", "control"]
SOURCES: dict[str, Source] = {"leave": "signal", "stopped": "control"}


@dataclass(frozen=True)
class End:
    """What one rank makes of its command's end."""

    verdict: Word | None  # None: it failed
    exit_code: int  # of this rank
    reason: str | None = None


def judge(code: int, asked: Asked | None, stop_signal: int) -> End:
    """``code``: the command's, -N for a signal. One that was asked to leave may do so by itself or by the signal."""
    by_signal = {-stop_signal, 128 + stop_signal, -signal.SIGTERM, 128 + signal.SIGTERM}
    status = code if code >= 0 else 128 - code
    if asked == "control":
        how = "" if code == 0 or code in by_signal else f"; the command {ending_in_words(code)}"
        return End("stopped", 0, f"asked to stop by control/stop{how}")
    if asked == "signal":
        return End("leave", 0) if code == 0 or code in by_signal else End(None, status)
    return End("completed", 0) if code == 0 else End(None, status)


def ending_in_words(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def environment(run: RunDir, launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """The command's: who it is among the tasks, in PyTorch's names, and what of its run it may want to know."""
    started = [event["attempt"] for event in read_journal(run.journal) if event["event"] == "attempt_started"]
    earlier = len([attempt for attempt in started if attempt != launch.attempt])
    return {
        "PYTHONUNBUFFERED": "1",  # or the log, and the steps in it, would come in lumps
        **environ,
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "NODE_RANK": environ.get("SLURM_NODEID", str(launch.rank // launch.local_world_size)),
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(launch.master_port),
        "HPCMOE_RUN_DIR": str(run.path),
        "HPCMOE_RUN_ID": run.run_id,
        "HPCMOE_ATTEMPT": launch.attempt,
        "HPCMOE_RESTARTS": str(earlier),
        "HPCMOE_FIRST_START": "0" if earlier else "1",
        "HPCMOE_FATAL": str(fatal_path(run, launch)),
    }


def fatal_path(run: RunDir, launch: Launch) -> Path:
    """Where a command says why to start it again would not help."""
    return run.attempt(launch.attempt) / f"fatal-rank{launch.rank:04d}.txt"


def start(engine: EngineConfig, stop_signal: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Raises UserError for a command that cannot be started."""
    words = ["bash", "-c", engine.command] if isinstance(engine.command, str) else [str(word) for word in engine.command]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that the end of what it leaves running is seen here

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(stop_signal, signal.SIG_DFL)  # shells ignore some for what they start in the background

    try:
        return subprocess.Popen(words, env=env, cwd=engine.chdir, process_group=0, preexec_fn=prepare)
    except FileNotFoundError as error:
        if error.filename == engine.chdir:
            raise UserError(f"engine.chdir={engine.chdir} does not exist on {os.uname().nodename}") from error
        raise UserError(f"engine.command: there is no program {words[0]!r} on {os.uname().nodename}") from error
    except OSError as error:
        raise UserError(f"engine.command: {words[0]!r} cannot be started: {error.strerror}") from error


class Running:
    """A command that runs: woken by signals and by its end, and looks at the control files and at its progress meanwhile."""

    def __init__(self, process: subprocess.Popen[bytes], stop_signal: int, signals: StopSignals, control: ControlFiles) -> None:
        self.process, self.stop_signal, self.signals, self.control = process, stop_signal, signals, control
        self.asked: Asked | None = None

    def see_out(self, look_s: float, kill_wait_s: float, progress: LogProgress | None) -> int:
        """Until the command and all of its process group have gone; returns its exit code, -N for a signal."""
        ear, mouth = socket.socketpair()
        ear.setblocking(False)
        mouth.setblocking(False)
        signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while self.process.poll() is None:
            self._look()
            if progress is not None:
                progress.look()
            select.select([ear], [], [], look_s)
            with contextlib.suppress(BlockingIOError):
                ear.recv(4096)
        self._look()  # its ranks elsewhere may have been told first
        self._end_group(kill_wait_s if self.asked else LEFTOVER_S)
        if progress is not None:
            progress.look(last=True)
        return int(self.process.returncode)

    def _look(self) -> None:
        if self.asked is None:
            stop = self.control.stop_asked()
            if stop or self.signals.heard or self.control.noticed():
                self.asked = "control" if stop else "signal"
                self._tell(self.stop_signal)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _end_group(self, patience_s: float) -> None:
        """A shell that is gone may have left a training behind that still saves."""
        if self.asked is None and self._group_lives():
            self._tell(signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while self._group_lives():
            if time.monotonic() > deadline:
                self._tell(signal.SIGKILL)
            time.sleep(GROUP_POLL_S)

    def _group_lives(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.process.pid, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def run_rank(run: RunDir, signals: StopSignals) -> int:
    """The exit code of this rank."""
    attempt = os.environ.get("HPCMOE_ATTEMPT", "unknown")
    try:
        launch = read_launch(run.path, os.environ)
        attempt = launch.attempt
        config = load_frozen(run.config)
        check_world(launch, config.nodes * config.tasks_per_node, config.tasks_per_node)
        end = _run(run, launch, config, signals)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_verdict(run, attempt, "failed", 0, reason=str(error))
        return 2
    if end.verdict is not None and launch.rank == 0:
        write_verdict(run, attempt, end.verdict, 0, SOURCES.get(end.verdict), end.reason)
    return end.exit_code


def _run(run: RunDir, launch: Launch, config: Config, signals: StopSignals) -> End:
    control = ControlFiles(run.control, run.notice(launch.attempt))
    if control.stop_asked():
        return End("stopped", 0, "asked to stop by control/stop")
    if signals.heard or control.noticed():
        return End("leave", 0)
    engine, log = config.engine, run.rank_log(launch.attempt, launch.rank)
    number = signal.Signals[f"SIG{engine.stop_signal}"]
    progress = LogProgress(run, launch.attempt, engine) if launch.rank == 0 else None
    running = Running(start(engine, number, environment(run, launch, os.environ)), number, signals, control)
    code = running.see_out(max(1.0, launch.world_size / LOOKS_PER_S), config.resilience.kill_wait_s, progress)
    end = judge(code, running.asked, number)
    if end.verdict is None and running.asked is None:
        time.sleep(LOG_SETTLES_S)
        said = tail_lines(log, 12)
        last = f"the command {ending_in_words(code)}" + (f": {said[-1].strip()}" if said else "")
        write_error_text(run, launch.attempt, launch.rank, "\n".join([*said, last]) + "\n")
        if fatal := tail_lines(fatal_path(run, launch), 1):
            write_verdict(run, launch.attempt, "failed", 0, reason=fatal[0].strip())
    return end


def main() -> int:
    signals = StopSignals().install()
    if len(sys.argv) != 2:
        print("usage: python -m hpcmoe.engine.command RUN_DIR", file=sys.stderr)
        return 2
    return run_rank(RunDir(Path(sys.argv[1]).absolute()), signals)


if __name__ == "__main__":
    sys.exit(main())
