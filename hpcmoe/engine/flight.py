"""The flight recorder: PyTorch's memory of the last collectives, written down when a run hangs. Works on NCCL and gloo.

Names as in PyTorch 2.13 (FlightRecorder.hpp, ProcessGroupNCCL.hpp). Read the files with torch's fr_trace.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path


def record_collectives(entries: int, folder: Path, env: MutableMapping[str, str]) -> None:
    """Before any process group is made. What the user has set in ``env`` stays; ``entries`` 0: no memory.

    When a collective times out NCCL's own watchdog writes ``folder``/collectives-nccl-rank<N> (pickled).
    """
    env.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))
    if entries:
        env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        env.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "collectives-nccl-rank"))


def dump_collectives(folder: Path, rank: int, env: MutableMapping[str, str] = os.environ) -> None:
    """This rank's last collectives as JSON, one file a backend that has any; nothing where they are not recorded."""
    if env.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return
    import torch._C._distributed_c10d as c10d  # the watchdog must not wait for an import that hangs: it is there already

    for backend, dump in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        if hasattr(c10d, dump):
            trace: bytes = getattr(c10d, dump)()
            (folder / f"collectives-{backend}-rank{rank:04d}.json").write_bytes(trace)
