"""What the one-machine Slurm testbed is: its nodes, partitions and timings, as the text of Slurm's own configuration files.

Pure functions of `Settings`; starting and stopping anything is `testbed.py`'s and `testbed_processes.py`'s job.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import socket
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

NODE_NAMES = ("n0001", "n0002", "n0003", "n0004")
CPUS_PER_NODE = 8
GPUS_PER_NODE = 4
MEMORY_MB_PER_NODE = 65536
GRACE_S = 8
KILL_WAIT_S = 30
ACCOUNT = "hpcmoe"

# A stepd's socket is ROOT/spool/n0001/n0001_<job>.<step>; the kernel takes 107 bytes.
LONGEST_ROOT = 64
# Below the kernel's ephemeral ports, so that no outgoing connection takes one between the choice and the daemon's bind.
PORT_RANGE = range(20000, 32000)

PARTITIONS = f"""\
PartitionName=high           Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=requeue_grace  Nodes=ALL PriorityTier=1  PreemptMode=REQUEUE GraceTime={GRACE_S} Default=YES
PartitionName=cancel_grace   Nodes=ALL PriorityTier=1  PreemptMode=CANCEL  GraceTime={GRACE_S}
PartitionName=requeue_nograce Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
"""


@dataclass(frozen=True)
class Settings:
    """One testbed. `ports` are slurmctld, slurmdbd, then one slurmd a node; `slurm_version` is (major, minor)."""

    root: Path
    cluster: str
    hostname: str
    ports: tuple[int, ...]
    slurm_version: tuple[int, int]
    user_signal: bool = False
    users: tuple[str, ...] = ("root",)
    max_array_size: int = 1001  # Slurm's own default

    @property
    def slurm_conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def logs(self) -> Path:
        return self.root / "log"

    @property
    def database(self) -> Path:
        return self.root / "mysql"

    @property
    def database_socket(self) -> Path:
        return self.database / "socket"

    def with_user_signal(self, on: bool) -> Settings:
        return replace(self, user_signal=on)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"root": str(self.root)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Settings:
        major, minor = fields["slurm_version"]
        return Settings(
            **fields
            | {
                "root": Path(fields["root"]),
                "ports": tuple(fields["ports"]),
                "slurm_version": (major, minor),
                "users": tuple(fields["users"]),
            }
        )


def new_settings(root: Path, version_text: str, *, user_signal: bool, users: tuple[str, ...]) -> Settings:
    """`version_text` is what `slurmctld -V` prints: "slurm-wlm 22.05.8"."""
    version = re.search(r"(\d+)\.(\d+)", version_text)
    if version is None:
        raise ValueError(f"no Slurm version in {version_text!r}")
    return Settings(
        root=root,
        # Distinct per root: job processes carry it in SLURM_CLUSTER_NAME, which is how `down` knows its own.
        cluster="testbed_" + hashlib.sha256(str(root).encode()).hexdigest()[:8],
        hostname=socket.gethostname().split(".")[0],
        ports=free_ports(2 + len(NODE_NAMES)),
        slurm_version=(int(version[1]), int(version[2])),
        user_signal=user_signal,
        users=tuple(dict.fromkeys(("root", *users))),
    )


def free_ports(count: int) -> tuple[int, ...]:
    """Ports nobody listens on now, in random order so that two testbeds starting together rarely meet."""
    found: list[int] = []
    for port in random.sample(PORT_RANGE, k=len(PORT_RANGE)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return tuple(found)
    raise RuntimeError(f"only {len(found)} free ports of the {count} needed in {PORT_RANGE}")


def slurm_conf(settings: Settings) -> str:
    root, logs = settings.root, settings.logs
    ctld_port, dbd_port, *slurmd_ports = settings.ports
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={settings.hostname} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE}"
        f" RealMemory={MEMORY_MB_PER_NODE} Gres=gpu:a100:{GPUS_PER_NODE} State=UNKNOWN"
        for name, port in zip(NODE_NAMES, slurmd_ports, strict=True)
    )
    return f"""\
ClusterName={settings.cluster}
SlurmctldHost={settings.hostname}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits cred_expire + 1 s before it may start again; Slurm's own default is 120 s.
AuthInfo=cred_expire=5
MailProg=/bin/true

StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd.%n.log

ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmdTimeout=20
KillWait={KILL_WAIT_S}
OverTimeLimit=0
JobRequeue=1
MinJobAge=300
MaxArraySize={settings.max_array_size}

SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{user_signal_line(settings)}

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStorageTRES=gres/gpu

# The nodes are larger than the machine under them.
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=DEFAULT State=UP DefaultTime=00:30:00 MaxTime=24:00:00
{PARTITIONS}"""


def user_signal_line(settings: Settings) -> str:
    """The option that makes preemption send the job's own `--signal`; it moved in 23.02."""
    if not settings.user_signal:
        return "# no user signal at preemption"
    if settings.slurm_version >= (23, 2):
        return "PreemptParameters=send_user_signal"
    return "SlurmctldParameters=preempt_send_user_signal"


def gres_conf(settings: Settings) -> str:
    return f"Name=gpu Type=a100 File={settings.root}/gpu/[0-{GPUS_PER_NODE - 1}]\n"


def slurmdbd_conf(settings: Settings) -> str:
    return f"""\
AuthType=auth/munge
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={settings.ports[1]}
SlurmUser=root
LogFile={settings.logs}/slurmdbd.log
PidFile={settings.root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
"""


def write_tree(settings: Settings) -> None:
    """Make the folders and configuration files. Everyone may read all but the database, Slurm's state and slurmdbd.conf."""
    root = settings.root
    for name, mode in (("log", 0o755), ("run", 0o755), ("spool", 0o755), ("gpu", 0o755), ("state", 0o700), ("mysql", 0o700)):
        (root / name).mkdir()
        (root / name).chmod(mode)
    for node in NODE_NAMES:
        (root / "spool" / node).mkdir(mode=0o755)
    for gpu in range(GPUS_PER_NODE):
        _make_device(root / "gpu" / str(gpu))
    write_slurm_conf(settings)
    _write(root / "gres.conf", gres_conf(settings), 0o644)
    _write(root / "slurmdbd.conf", slurmdbd_conf(settings), 0o600)


def _make_device(path: Path) -> None:
    """A count of GPUs with no file behind each leaves the node INVALID_REG; only a device gets the job CUDA_VISIBLE_DEVICES."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)
    except PermissionError:  # a container without CAP_MKNOD: jobs run all the same
        path.touch()


def write_slurm_conf(settings: Settings) -> None:
    _write(settings.slurm_conf, slurm_conf(settings), 0o644)


def _write(path: Path, text: str, mode: int) -> None:
    """Whole or not at all: a command of Slurm's that reads it in this moment must not find it empty."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.chmod(mode)
    os.replace(fresh, path)


def dumps(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"
