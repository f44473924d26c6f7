"""Munge for the testbed: use the machine's munged where one answers, else start one that testbeds share.

Slurm's commands look for munged at one fixed socket, so it cannot live under a testbed's folder. Its key, its log and the list of
testbeds that need it are in /run/hpcmoe-testbed; the last testbed to leave stops it. Nobody else's munged is ever touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.slurm.testbed_processes import Process, TestbedError, daemon_environment, last_lines, spawn, start_ticks, stop

SHARED = Path("/run/hpcmoe-testbed")
SOCKET_FOLDER = Path("/run/munge")
RECORD = SHARED / "munged.json"
USERS = SHARED / "users"


def acquire(name: str, owner_pid: int) -> str:
    """Make munge answer for testbed `name`, which lives while process `owner_pid` does; returns who runs it."""
    with _lock():
        ours = _recorded()
        if not answers():
            if ours is not None:
                stop([ours], patience_s=2)
            ours = _start()
        if ours is None:
            return "the munged that was running already"
        _register(name, owner_pid)
        return f"munged (pid {ours.pid}), shared by testbeds"


def keep_for(name: str, owner_pid: int) -> None:
    """The testbed is up: from now on the claim lasts as long as `owner_pid` (its slurmctld), not as long as `up`."""
    with _lock():
        if (USERS / name).exists():
            _register(name, owner_pid)


def release(name: str) -> None:
    """Give up the claim; stop our munged when nobody else needs it."""
    if not SHARED.exists():
        return
    with _lock():
        (USERS / name).unlink(missing_ok=True)
        ours = _recorded()
        if ours is not None and not _live_users():
            stop([ours], patience_s=2)
            RECORD.unlink()
            (SHARED / "key").unlink(missing_ok=True)


def answers() -> bool:
    """Whether a credential makes the round trip."""
    try:
        credential = subprocess.run(["munge", "-n"], capture_output=True, timeout=10, check=True).stdout
        return subprocess.run(["unmunge"], input=credential, capture_output=True, timeout=10).returncode == 0
    except (subprocess.SubprocessError, OSError):
        return False


def _start() -> Process:
    SOCKET_FOLDER.mkdir(exist_ok=True)
    SOCKET_FOLDER.chmod(0o755)  # every user's commands must reach the socket
    key = SHARED / "key"
    key.unlink(missing_ok=True)
    with open(os.open(key, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(128))
    log = SHARED / "munged.log"
    # --force: the package gives the socket's folder to user munge, which a munged of root's would refuse.
    argv = [shutil.which("munged") or "/usr/sbin/munged", "--foreground", "--force", f"--key-file={key}"]
    argv += [f"--pid-file={SHARED}/munged.pid", f"--seed-file={SHARED}/seed", f"--log-file={log}"]
    process = spawn("munged", argv, log=log, env=daemon_environment({}), cwd=SHARED)
    RECORD.write_text(json.dumps({"pid": process.pid, "started": process.started}))
    deadline = time.monotonic() + 10
    while not answers():
        if not process.alive() or time.monotonic() > deadline:
            stop([process], patience_s=1)
            raise TestbedError(f"munged does not answer: {last_lines(log)}")
        time.sleep(0.05)
    return process


def _recorded() -> Process | None:
    return _read_process(RECORD)


def _register(name: str, owner_pid: int) -> None:
    USERS.mkdir(exist_ok=True)
    (USERS / name).write_text(json.dumps({"pid": owner_pid, "started": start_ticks(owner_pid) or -1}))


def _live_users() -> list[str]:
    return [path.name for path in USERS.iterdir() if _read_process(path) is not None] if USERS.exists() else []


def _read_process(path: Path) -> Process | None:
    """The recorded process, if it still is that one."""
    try:
        process = Process(path.name, **json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return process if process.alive() else None


@contextmanager
def _lock() -> Iterator[None]:
    SHARED.mkdir(mode=0o700, exist_ok=True)
    with (SHARED / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
