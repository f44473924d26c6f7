"""``python -m hpcmoe.engine RUN_DIR``: one rank. Hears signals before torch is imported; everything else is in main."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

from hpcmoe.engine.stop import StopSignals


def main() -> int:
    begun = time.monotonic()
    signals = StopSignals().install()
    if len(sys.argv) != 2:
        print("usage: python -m hpcmoe.engine RUN_DIR", file=sys.stderr)
        return 2
    # Importing PyTorch makes half a million objects and drops few: looking for garbage among them is a fifth of the time.
    # What is there afterwards stays for good, so later collections pass it over.
    gc.disable()
    from hpcmoe.engine.main import run_rank

    gc.freeze()
    gc.enable()
    return run_rank(Path(sys.argv[1]), signals, begun)


if __name__ == "__main__":
    sys.exit(main())
