"""The short job of `hpcmoe doctor --job`: looks at one compute node and says what that means for runs."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcmoe.files import read_json, write_atomic
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.directives import directive, filename_pattern
from hpcmoe.slurm.probe import Asks, Finding
from hpcmoe.slurm.states import is_alive
from hpcmoe.slurm.submit import sbatch

LOOK_EVERY_S = 2.0
LATE_FILE_S = 20.0  # a network file system may show a file so much later
SLOW_IMPORT_S = 60.0
TOPIC = "node"


def look_at_a_node(
    root: Path, asks: Asks, gpus: bool, setup: Sequence[str], env: dict[str, str], patience_s: float
) -> list[Finding]:
    """Submit the job, wait for it, judge what it found. It is cancelled when it has not run within ``patience_s``."""
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=root, prefix=".hpcmoe-doctor-"))
    try:
        write_atomic(folder / "job.sh", _script(folder, asks, gpus, setup, env))
        try:
            job_id = sbatch(folder / "job.sh", token=f"doctor-{secrets.token_hex(4)}")
        except SlurmError as error:
            return [Finding(TOPIC, "bad", f"Slurm refuses a job of one node and ten minutes: {error}", "see the findings above")]
        problem = _wait(job_id, folder / "node.json", patience_s)
        if problem is not None:
            return [problem]
        return list(judge(read_json(folder / "node.json"), gpus))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _script(folder: Path, asks: Asks, gpus: bool, setup: Sequence[str], env: dict[str, str]) -> str:
    words: list[tuple[str, str | int | None]] = [
        ("job-name", "hpcmoe-doctor"),
        ("nodes", 1),
        ("ntasks", 1),
        ("time", "10"),
        ("output", filename_pattern(str(folder)) + "/job.log"),
        ("partition", asks.partition),
        ("account", asks.account),
        ("qos", asks.qos),
        ("gres", "gpu:1" if gpus else None),
    ]
    lines = ["#!/bin/bash", *(directive(flag, value) for flag, value in words if value is not None), "", *setup]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    lines.append(shlex.join([sys.executable, "-m", "hpcmoe.runs.nodecheck", str(folder / "node.json")]))
    return "\n".join(lines) + "\n"


def _wait(job_id: str, answer: Path, patience_s: float) -> Finding | None:
    """None when the answer is there."""
    deadline, gone_since = time.monotonic() + patience_s, None
    state = "not seen"
    while time.monotonic() < deadline:
        if answer.exists():
            return None
        try:
            row = client.squeue([job_id]).get(job_id)
        except SlurmError:
            row = None
        if row is not None:
            state = f"{row.state} ({row.reason})"
        if row is not None and not is_alive(row.state):
            gone_since = gone_since or time.monotonic()
            if time.monotonic() - gone_since > LATE_FILE_S:
                return _no_answer(job_id, row.state, answer)
        time.sleep(LOOK_EVERY_S)
    with contextlib.suppress(SlurmError):
        client.cancel([job_id])
    return Finding(TOPIC, "unknown", f"job {job_id} was {state} after {patience_s:.0f} s, and is cancelled", "--wait=SECONDS")


def _no_answer(job_id: str, state: str, answer: Path) -> Finding:
    log = answer.parent / "job.log"
    if not log.exists():
        says = f"job {job_id} ended as {state} and nothing that it wrote is to be seen here"
        return Finding(TOPIC, "bad", says, "set HPCMOE_RUNS to a folder that login and compute nodes share")
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no word"])[-1]
    return Finding(
        TOPIC, "bad", f"job {job_id} ended as {state}: {last}", "put what it needs into cluster.setup (module load ...)"
    )


def judge(node: Any, gpus: bool) -> Iterator[Finding]:
    """What the node's answer means. Pure."""
    yield Finding(TOPIC, "ok", f"{node['host']} sees the run root ({node['file_system']}) and runs Python {node['python']}")
    if node["torch"] is None:
        yield Finding(TOPIC, "bad", f"PyTorch cannot be imported: {node['torch_problem']}", "install it where the node sees it")
    else:
        slow = node["torch_import_s"] > SLOW_IMPORT_S
        says = f"PyTorch {node['torch']} is imported in {node['torch_import_s']:.1f} s"
        fix = "keep the environment on a fast or local file system: every rank of every attempt pays this" if slow else None
        yield Finding(TOPIC, "warn" if slow else "ok", says, fix)
    if gpus and not node["gpus"] and not node["torch_gpus"]:
        yield Finding(
            TOPIC, "bad", "asked for a GPU and got none that nvidia-smi or PyTorch sees", "check slurm.gres, cluster.setup"
        )
    elif gpus and node["torch"] and not node["torch_gpus"]:
        yield Finding(
            TOPIC, "bad", f"{node['gpus']} GPU, and PyTorch sees none", "install a PyTorch that is built for this driver"
        )
    elif gpus:
        yield Finding(TOPIC, "ok", f"PyTorch sees {node['torch_gpus']} GPU, as asked")
    if "scontrol" in node["commands"] and node["scontrol_answers"]:
        yield Finding(TOPIC, "ok", "scontrol works there: a run requeues itself")
    elif "sbatch" in node["commands"]:
        says = "scontrol does not work there: a run submits its successor instead of requeueing itself"
        yield Finding(TOPIC, "warn", says, "keep `hpcmoe supervise` on a login node, which saves the age in the queue")
    else:
        says = "neither scontrol nor sbatch is there: a run cannot bring itself back where Slurm does not requeue it"
        yield Finding(TOPIC, "warn", says, "keep `hpcmoe supervise` running on a login node (docs/recovery.md)")
