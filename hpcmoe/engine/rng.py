"""Random state of one rank as bytes: Python's, numpy's, torch's and the GPU's. A resumed run continues each where it stopped."""

from __future__ import annotations

import pickle
import random

import numpy as np
import torch


def seed_everything(seed: int, rank: int) -> None:
    """Different on every rank. Initial weights and data order do not come from here: they must not depend on the layout."""
    mixed = (seed * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def rng_state() -> bytes:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu))


def set_rng_state(state: bytes) -> None:
    python, numpy_state, cpu, gpu = pickle.loads(state)
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(cpu)
    if gpu is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(gpu)
