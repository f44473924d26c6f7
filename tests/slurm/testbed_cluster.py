"""The testbed's life: bring its daemons up in the order Slurm needs, change a setting, say how it is, take it down again.

All state is under one folder, where `testbed.json` records what runs. Not for the command line (`testbed.py`), nor for what the
configuration says (`testbed_config.py`).
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.slurm import testbed_munge
from tests.slurm.testbed_config import (
    ACCOUNT,
    LONGEST_ROOT,
    NODE_NAMES,
    Settings,
    dumps,
    new_settings,
    write_slurm_conf,
    write_tree,
)
from tests.slurm.testbed_processes import (
    SBIN_PATH,
    Process,
    TestbedError,
    daemon_environment,
    job_processes,
    last_lines,
    node_processes,
    spawn,
    stop,
    stop_job_processes,
)

PACKAGES = {  # a program each package brings
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "slurm-client": "sacctmgr",
    "munge": "munged",
    "mariadb-server": "mariadbd",
}
RECORD = "testbed.json"
STARTED = "slurmctld"  # the process whose life is the testbed's


@dataclass
class Record:
    """What `testbed.json` holds."""

    settings: Settings
    munge: str
    processes: list[Process] = field(default_factory=list)

    def save(self) -> None:
        path = self.settings.root / RECORD
        fresh = path.with_suffix(".new")
        processes = [asdict(process) for process in self.processes]
        fresh.write_text(dumps({"settings": self.settings.as_json(), "munge": self.munge, "processes": processes}))
        os.replace(fresh, path)

    def start(self, name: str, argv: list[str], **environment: str) -> None:
        """Start a daemon and note it at once, so that `down` knows it even if `up` is interrupted here."""
        settings = self.settings
        env = daemon_environment({"SLURM_CONF": str(settings.slurm_conf), **environment})
        program = [_program(argv[0]), *argv[1:]]
        log = settings.logs / f"{name}.console"
        self.processes.append(spawn(name, program, log=log, env=env, cwd=settings.logs))
        self.save()

    def dead(self) -> list[str]:
        return [process.name for process in self.processes if not process.alive()]


def load(root: Path) -> Record | None:
    try:
        fields = json.loads((root / RECORD).read_text())
    except FileNotFoundError:
        return None
    processes = [Process(**process) for process in fields["processes"]]
    return Record(Settings.from_json(fields["settings"]), fields["munge"], processes)


def missing_packages() -> list[str]:
    return [package for package, program in PACKAGES.items() if _which(program) is None]


def install_command(packages: list[str]) -> list[str]:
    return ["apt-get", "install", "-y", "--no-install-recommends", *packages]


def why_unusable() -> str | None:
    """One line saying what this machine lacks for a testbed; None if nothing."""
    if os.geteuid() != 0:
        return "the testbed needs root, as slurmd starts each job as the user who submitted it: use sudo, or root in a container"
    if missing := missing_packages():
        return f"Slurm's packages are missing; install them with: {' '.join(install_command(missing))}"
    return None


def up(root: Path, *, user_signal: bool = False, users: tuple[str, ...] = ()) -> Record:
    """Start a testbed with no jobs and no history in `root`, and return when every node is idle."""
    if reason := why_unusable():
        raise TestbedError(reason, setup=True)
    _check_root(root)
    for user in users:
        _check_user(user)
    version = subprocess.run([_program("slurmctld"), "-V"], capture_output=True, text=True, check=True).stdout
    settings = new_settings(root, version, user_signal=user_signal, users=users)
    _clear(root)
    write_tree(settings)
    record = Record(settings, testbed_munge.acquire(settings.cluster, os.getpid()))
    record.save()
    try:
        _start_database(record)
        _start_slurm(record)
        slurmctld = next(process for process in record.processes if process.name == STARTED)
        testbed_munge.keep_for(settings.cluster, slurmctld.pid)
    except BaseException:
        down(root)
        raise
    return record


def _check_root(root: Path) -> None:
    if len(str(root)) > LONGEST_ROOT:
        raise TestbedError(
            f"{root} is {len(str(root))} characters long, over {LONGEST_ROOT}: sockets need short paths", setup=True
        )
    if root.exists() and any(root.iterdir()) and not (root / RECORD).exists():
        raise TestbedError(f"{root} is not empty and is no testbed; choose another folder", setup=True)
    for folder in root.parents:
        if folder.exists() and not folder.stat().st_mode & 0o001:
            raise TestbedError(f"{folder} is closed to other users, whose jobs must read files under {root}", setup=True)


def _check_user(user: str) -> None:
    try:
        pwd.getpwnam(user)
    except KeyError:
        raise TestbedError(f"no user {user} here; make one with: useradd --create-home {user}", setup=True) from None


def _clear(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o755)
    for entry in root.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _start_database(record: Record) -> None:
    settings = record.settings
    tables = next(iter(sorted(Path("/usr/share/mysql").glob("*_system_tables.sql"))), None)
    if tables is None:
        raise TestbedError("no /usr/share/mysql/*_system_tables.sql; is mariadb-server whole?", setup=True)
    common = [_program("mariadbd"), "--no-defaults", "--user=root", f"--datadir={settings.database}", "--innodb-log-file-size=8M"]
    common += ["--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
    # What mariadb-install-db does, less the help texts and grants that take it most of its time.
    script = "create database if not exists mysql;\nuse mysql;\n" + tables.read_text()
    with (settings.logs / "mariadbd.bootstrap").open("w") as log:
        done = subprocess.run(
            [*common, "--bootstrap"], input=script, text=True, stdout=log, stderr=log, env=daemon_environment({}), timeout=60
        )
    if done.returncode:
        raise TestbedError(f"the database could not be made: {last_lines(settings.logs / 'mariadbd.bootstrap')}")
    # No grants are needed: only root can enter the socket's folder.
    record.start("mariadbd", [*common, "--skip-networking", "--skip-grant-tables", f"--socket={settings.database_socket}"])
    _wait(record, "the database to answer", settings.database_socket.exists)
    _start_daemon(record, "slurmdbd")


def _start_slurm(record: Record) -> None:
    settings = record.settings
    slurm(settings, "sacctmgr", "-i", "add", "cluster", settings.cluster)
    slurm(settings, "sacctmgr", "-i", "add", "account", ACCOUNT, f"Cluster={settings.cluster}")
    slurm(settings, "sacctmgr", "-i", "add", "user", ",".join(settings.users), f"Account={ACCOUNT}")
    _start_daemon(record, STARTED)
    for node in NODE_NAMES:
        _start_daemon(record, f"slurmd.{node}")
    _wait(record, "all nodes to be idle", lambda: node_states(settings) == dict.fromkeys(NODE_NAMES, "idle"))


def _start_daemon(record: Record, name: str) -> None:
    """slurmdbd, slurmctld or slurmd.NODE; returns when the first two answer."""
    settings = record.settings
    if name == "slurmdbd":
        # It has no option for the socket's path; MariaDB's client library takes it from here.
        record.start(name, ["slurmdbd", "-D"], MYSQL_UNIX_PORT=str(settings.database_socket))
        _wait(record, "slurmdbd to listen", lambda: _listening(settings.ports[1]))
    elif name == STARTED:
        record.start(name, ["slurmctld", "-D", "-f", str(settings.slurm_conf)])
        _wait(record, "slurmctld to answer", lambda: "UP" in slurm(settings, "scontrol", "ping", check=False))
    else:
        record.start(name, ["slurmd", "-D", "-N", name.removeprefix("slurmd."), "-f", str(settings.slurm_conf)])


def stop_daemon(root: Path, name: str) -> None:
    """Stop slurmdbd, slurmctld or slurmd.NODE alone, as an administrator does; `start_daemon` brings it back."""
    record = _loaded(root)
    if name == STARTED:
        testbed_munge.keep_for(record.settings.cluster, os.getpid())  # while nothing of the testbed's can hold the claim
    stop(_take(record, name), patience_s=10)


def kill_node(root: Path, node: str) -> None:
    """The node dies: its slurmd and everything that it started are killed at once. `start_daemon` of its slurmd mends it."""
    record = _loaded(root)
    for process in [*_take(record, f"slurmd.{node}"), *node_processes(root, record.settings.cluster, node)]:
        process.kill(signal.SIGKILL)


def start_daemon(root: Path, name: str) -> None:
    record = _loaded(root)
    _start_daemon(record, name)
    if name == STARTED:
        testbed_munge.keep_for(record.settings.cluster, record.processes[-1].pid)


def _loaded(root: Path) -> Record:
    record = load(root)
    if record is None:
        raise TestbedError(f"no testbed in {root}")
    return record


def _take(record: Record, name: str) -> list[Process]:
    """Take a daemon out of the record, so that nobody misses it while it is away on purpose."""
    taken = [process for process in record.processes if process.name == name]
    record.processes = [process for process in record.processes if process.name != name]
    record.save()
    return taken


def down(root: Path) -> bool:
    """Stop what `up` started, and the jobs; logs stay. False if there was nothing to stop."""
    record = load(root)
    if record is None:
        return False
    was_up = any(process.alive() for process in record.processes)
    by_name = {process.name: process for process in record.processes}
    # slurmctld first, so that it does not requeue the jobs that now die.
    stop([process for name, process in by_name.items() if name == STARTED], patience_s=3)
    stop([process for name, process in by_name.items() if name.startswith("slurmd.")], patience_s=3)
    stop_job_processes(root, record.settings.cluster)
    stop([process for name, process in by_name.items() if name == "slurmdbd"], patience_s=2)
    stop(record.processes, patience_s=5)
    testbed_munge.release(record.settings.cluster)
    record.processes = []
    record.save()
    return was_up


def set_user_signal(root: Path, on: bool) -> Record:
    """Turn preemption's user signal on or off in the running testbed; returns when slurmctld says so itself."""
    record = load(root)
    if record is None or not record.processes or record.dead():
        raise TestbedError(f"no testbed runs in {root}")
    record.settings = record.settings.with_user_signal(on)
    write_slurm_conf(record.settings)
    slurm(record.settings, "scontrol", "reconfigure")
    _wait(record, f"user_signal={'on' if on else 'off'} to take effect", lambda: user_signal(record.settings) is on)
    record.save()
    return record


def set_max_array_size(root: Path, most: int) -> None:
    """Of the running testbed, from now on. slurmctld is started anew: it looks at this setting once in its life."""
    record = _loaded(root)
    record.settings = replace(record.settings, max_array_size=most)
    record.save()
    write_slurm_conf(record.settings)
    stop_daemon(root, STARTED)
    start_daemon(root, STARTED)


def user_signal(settings: Settings) -> bool:
    """What slurmctld does now, whatever the file says."""
    return "send_user_signal" in slurm(settings, "scontrol", "show", "config")


def add_user(root: Path, user: str) -> None:
    """Give a system user an account in the running testbed."""
    record = _loaded(root)
    _check_user(user)
    if user not in record.settings.users:
        slurm(record.settings, "sacctmgr", "-i", "add", "user", user, f"Account={ACCOUNT}")
        record.settings = replace(record.settings, users=(*record.settings.users, user))
        record.save()


def node_states(settings: Settings) -> dict[str, str]:
    rows = slurm(settings, "sinfo", "-h", "-N", "-p", "high", "-o", "%N %T", check=False).split("\n")
    return dict(row.split() for row in rows if len(row.split()) == 2)


def report(root: Path) -> tuple[bool, str]:
    """(is it wholly up, what to print)."""
    record = load(root)
    if record is None or not record.processes:
        return False, f"no testbed runs in {root}"
    lines = [f"{p.name:14} pid {p.pid:<8} {'running' if p.alive() else 'DEAD'}" for p in record.processes]
    lines.append(f"{'munge':14} {record.munge}{'' if testbed_munge.answers() else ': DOES NOT ANSWER'}")
    states = node_states(record.settings)
    lines += [f"{node:14} {states.get(node, 'unknown')}" for node in NODE_NAMES]
    jobs = job_processes(root, record.settings.cluster)
    lines.append(f"{'jobs':14} {len(jobs)} processes")
    lines.append(f"{'user_signal':14} {'on' if record.settings.user_signal else 'off'}")
    good = not record.dead() and testbed_munge.answers() and len(states) == len(NODE_NAMES)
    return good and not any("*" in state or "down" in state for state in states.values()), "\n".join(lines)


def slurm(settings: Settings, *argv: str, check: bool = True) -> str:
    """Standard output of one Slurm command against this testbed."""
    env = daemon_environment({"SLURM_CONF": str(settings.slurm_conf)})
    try:
        done = subprocess.run([_program(argv[0]), *argv[1:]], env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise TestbedError(f"no answer within 120 s: {' '.join(argv)}") from None
    if check and done.returncode:
        raise TestbedError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _wait(record: Record, what: str, ready: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        logs = record.settings.logs
        for name in record.dead():
            log = logs / f"{name}.log" if (logs / f"{name}.log").exists() else logs / f"{name}.console"
            raise TestbedError(f"{name} died: {last_lines(log)}")
        if time.monotonic() > deadline:
            raise TestbedError(f"waited {seconds:.0f} s for {what}; the logs are in {logs}")
        time.sleep(0.1)


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{SBIN_PATH}")


def _program(name: str) -> str:
    """Absolute path: the daemons are in sbin, which is not on everybody's PATH."""
    path = _which(name)
    if path is None:
        raise TestbedError(f"{name} is not installed", setup=True)
    return path
