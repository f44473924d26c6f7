"""``python -m hpcmoe.engine RUN_DIR``: one rank. Hears signals before torch is imported; everything else is in main."""

from __future__ import annotations

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
    from hpcmoe.engine.main import run_rank

    return run_rank(Path(sys.argv[1]), signals, begun)


if __name__ == "__main__":
    sys.exit(main())
