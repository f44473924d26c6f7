"""Start daemons and stop exactly them: a process is its pid plus its start time, so a reused pid is never signalled.

Also finds what the testbed's slurmds left running for jobs. Not for the order of things: that is `testbed.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SBIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class TestbedError(Exception):
    """What the user must know, in one line; `testbed.py` prints it and exits 1 (2 when `setup` is at fault)."""

    __test__ = False  # the name starts with Test, but pytest need not look

    def __init__(self, message: str, *, setup: bool = False) -> None:
        super().__init__(message)
        self.setup = setup


@dataclass(frozen=True)
class Process:
    """`started` is the kernel's start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    name: str
    pid: int
    started: int

    def alive(self) -> bool:
        return start_ticks(self.pid) == self.started

    def kill(self, sig: signal.Signals) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):  # it may end between the look and the call
                os.kill(self.pid, sig)


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; None where there is no such process, or only a zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold blanks and brackets
    return None if fields[0] in "ZX" else fields


def start_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[19])


def parent(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[1])


def daemon_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Small and fixed, so that a daemon started from inside a job or a virtual environment behaves the same."""
    return {"PATH": SBIN_PATH, "LC_ALL": "C.UTF-8", "HOME": "/", **extra}


def spawn(name: str, argv: list[str], *, log: Path, env: Mapping[str, str], cwd: Path) -> Process:
    """Start a foreground daemon in a session of its own; what it says before it opens its log goes to `log`."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(env), cwd=cwd, start_new_session=True
        )
    started = start_ticks(child.pid)
    if started is None:
        child.wait()
        raise TestbedError(f"{name} ended at once: {last_lines(log)}")
    return Process(name, child.pid, started)


def last_lines(log: Path, count: int = 3) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in lines[-count:]) or f"nothing in {log}"


def stop(processes: Iterable[Process], *, patience_s: float) -> None:
    """TERM all, wait up to `patience_s`, KILL what is left, and wait until it is gone."""
    left = [process for process in processes if process.alive()]
    for process in left:
        process.kill(signal.SIGTERM)
    left = _wait_gone(left, patience_s)
    for process in left:
        process.kill(signal.SIGKILL)
    left = _wait_gone(left, 5.0)
    if left:
        raise TestbedError("still running after SIGKILL: " + ", ".join(f"{p.name} (pid {p.pid})" for p in left))


def _wait_gone(processes: list[Process], seconds: float) -> list[Process]:
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if process.alive()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def job_processes(root: Path, cluster: str) -> list[Process]:
    """The testbed's slurmstepds, their descendants, and job processes that left that tree (setsid, nohup).

    A stepd is known by its open files under `root`; a job process by SLURM_CLUSTER_NAME, which is unique to `root`, together with
    SLURMD_NODENAME, which only slurmd sets: a shell that merely uses the testbed has no such variable.
    """
    return _with_descendants(lambda pid: _is_stepd(pid, f"{root}/") or _is_job_process(pid, cluster))


def node_processes(root: Path, cluster: str, node: str) -> list[Process]:
    """Of these the ones that one node's slurmd started: its stepds write into its log."""
    log = f"{root}/log/slurmd.{node}.log"
    return _with_descendants(lambda pid: _is_stepd(pid, log) or _is_job_process(pid, cluster, node))


def _with_descendants(chosen: Callable[[int], bool]) -> list[Process]:
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    parents = {pid: parent(pid) for pid in pids}
    found = {pid for pid in pids if chosen(pid)}
    while grown := {pid for pid, above in parents.items() if above in found} - found:
        found |= grown
    return [Process(_command_name(pid), pid, ticks) for pid in sorted(found) if (ticks := start_ticks(pid)) is not None]


def _is_stepd(pid: int, opened: str) -> bool:
    """A slurmstepd with an open file whose path begins with ``opened``."""
    try:
        if not os.readlink(PROC / str(pid) / "exe").rpartition("/")[2].startswith("slurmstepd"):
            return False
        links = [os.readlink(link) for link in (PROC / str(pid) / "fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith(opened) for link in links)


def _is_job_process(pid: int, cluster: str, node: str = "") -> bool:
    try:
        variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"SLURM_CLUSTER_NAME={cluster}".encode() in variables and any(
        v.startswith(f"SLURMD_NODENAME={node}".encode()) for v in variables
    )


def _command_name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return "?"


def stop_job_processes(root: Path, cluster: str) -> None:
    """KILL until none is left: a batch script may start one more process while it is being looked for."""
    deadline = time.monotonic() + 10
    while left := job_processes(root, cluster):
        if time.monotonic() > deadline:
            raise TestbedError("job processes still running: " + ", ".join(f"{p.name} (pid {p.pid})" for p in left))
        for process in left:
            process.kill(signal.SIGKILL)
        time.sleep(0.05)
