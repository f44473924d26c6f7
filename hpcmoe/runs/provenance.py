"""What a run was made from: code, packages, machine, command. Collected once, at submit, for all runs of a multirun together.

Never fails a submission.
"""

from __future__ import annotations

import getpass
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcmoe import __version__
from hpcmoe.files import write_atomic, write_json
from hpcmoe.resources import PACKAGE
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError

GIT_TIMEOUT_S = 20.0


FILE = "provenance.json"


def write_provenance(home: Path, scheduler: str) -> None:
    """Write provenance.json into ``home`` and, beside it, packages and each source tree's git status and diff."""
    folder = home / "provenance"
    folder.mkdir(parents=True, exist_ok=True)
    packages = sorted({f"{dist.name}=={dist.version}" for dist in metadata.distributions() if dist.name})
    write_atomic(folder / "packages.txt", "\n".join(packages) + "\n")
    trees = {"hpcmoe": PACKAGE.parent, "cwd": Path.cwd()}
    git = {name: _git_facts(folder, name, tree) for name, tree in trees.items()}
    write_json(
        home / FILE,
        {
            "hpcmoe": __version__,
            "argv": sys.argv,
            "cwd": os.getcwd(),
            "user": getpass.getuser(),
            "host": platform.node(),
            "platform": platform.platform(),
            "python": sys.version,
            "executable": sys.executable,
            "time": time.time(),
            "modules": [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name],
            "git": git,
            "slurm": _slurm_facts() if scheduler == "slurm" else None,
        },
    )


def _git(tree: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *words], capture_output=True, timeout=GIT_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None


def _git_facts(folder: Path, name: str, tree: Path) -> dict[str, Any] | None:
    """Commit, and whether the tree differs from it; None where there is no git work tree. An installed package has none."""
    commit = _git(tree, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(tree, "status", "--porcelain") or ""
    write_atomic(folder / f"{name}_git_status.txt", status)
    write_atomic(folder / f"{name}_git_diff.patch", _git(tree, "diff", "HEAD") or "")
    return {
        "commit": commit.strip(),
        "dirty": bool(status.strip()),
        "tree": (_git(tree, "rev-parse", "--show-toplevel") or "").strip(),
    }


def _slurm_facts() -> dict[str, Any] | None:
    try:
        return asdict(client.cluster_facts())
    except SlurmError as error:
        return {"unknown": str(error)}
