"""``python -m hpcmoe.slurm.port``: prints a TCP port that is free on this host, for the ranks' rendezvous."""

from __future__ import annotations

import random
import socket

# Below the range from which the kernel takes ports for outgoing connections (32768 up, ip(7)): what is free now stays free
# until rank 0 listens, unless someone asks for this very port.
FIRST, LAST = 20000, 31999


def free_port() -> int:
    """A port on which this host listens nowhere yet. Raises OSError when there is none in the whole range."""
    for port in random.sample(range(FIRST, LAST + 1), LAST - FIRST + 1):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free TCP port between {FIRST} and {LAST}")


if __name__ == "__main__":
    print(free_port())
