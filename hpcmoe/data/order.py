"""The order in which training sees sequences: a seeded permutation each epoch, computable at any position without state.

Own arithmetic rather than a library's shuffle: the order must not change with a library's version, or resumed runs differ.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

ROUNDS = 4
MASK = (1 << 64) - 1


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def _mix(value: int) -> int:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """Where ``index`` goes in a permutation of range(size) drawn by (seed, epoch).

    A Feistel network over the smallest even number of bits that holds ``size``; results outside the range walk on.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for key in _keys(seed, epoch):
            left, right = right, left ^ (_mix(right ^ key) & low)
        index = left << half | right
        if index < size:
            return index


def sequence_at(position: int, size: int, seed: int) -> int:
    """The sequence (0 .. size-1) that is the ``position``-th sample of the whole training."""
    epoch, index = divmod(position, size)
    return permuted(index, size, seed, epoch)
