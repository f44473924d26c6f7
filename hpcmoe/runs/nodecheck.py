"""``python -m hpcmoe.runs.nodecheck OUT``: what a compute node is like for a run, as JSON. Run by `hpcmoe doctor --job`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hpcmoe.files import write_json
from hpcmoe.runs.rootcheck import file_system

SECONDS = 300.0
TORCH = (
    "import time; t = time.perf_counter(); import torch; "
    "print(torch.__version__, round(time.perf_counter() - t, 2), torch.cuda.device_count() if torch.cuda.is_available() else 0)"
)


def look(out: Path) -> dict[str, Any]:
    """What this host has. None: could not be told."""
    torch = import_torch()
    return {
        "host": os.uname().nodename,
        "python": platform.python_version(),
        "commands": [name for name in ("sbatch", "scontrol", "squeue", "sacct", "srun") if shutil.which(name)],
        "scontrol_answers": answers("scontrol", "show", "config"),
        "gpus": len(nvidia.splitlines()) if (nvidia := said("nvidia-smi", "-L")) else 0,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "file_system": file_system(out.parent),
        **torch,
        "t": time.time(),
    }


def import_torch() -> dict[str, Any]:
    """PyTorch's version, the seconds of its import in a new process, and the GPUs that it sees."""
    done = _run(sys.executable, "-c", TORCH)
    words = done.stdout.split() if done is not None and done.returncode == 0 else []
    if len(words) != 3:
        why = "no answer" if done is None else (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"torch": None, "torch_import_s": None, "torch_gpus": None, "torch_problem": why}
    return {"torch": words[0], "torch_import_s": float(words[1]), "torch_gpus": int(words[2]), "torch_problem": None}


def said(*argv: str) -> str | None:
    """What a command printed; None when it failed or is not there."""
    done = _run(*argv)
    return done.stdout if done is not None and done.returncode == 0 else None


def answers(*argv: str) -> bool:
    return said(*argv) is not None


def _run(*argv: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m hpcmoe.runs.nodecheck OUT", file=sys.stderr)
        return 2
    write_json(Path(argv[0]), look(Path(argv[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
