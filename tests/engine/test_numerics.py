"""Determinism is set where it was asked for, and never against the user's own words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpcmoe.config.schema import TrainConfig
from hpcmoe.engine.flight import record_collectives
from hpcmoe.engine.numerics import set_numerics
from tests.engine.ranks import small_config


@pytest.fixture
def kept() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.usefixtures("kept")
def test_deterministic_training_fixes_algorithms_and_threads() -> None:
    env = {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Tree"}
    set_numerics(small_config(Path("text"), 1, 1, 1), env)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.get_num_threads() == 1
    assert env == {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, (
        "the user's NCCL_ALGO stays"
    )


@pytest.mark.usefixtures("kept")
def test_otherwise_the_libraries_choose() -> None:
    torch.use_deterministic_algorithms(False)
    env: dict[str, str] = {}
    train = TrainConfig(steps=1, seq_len=32, global_batch_tokens=256, deterministic=False)
    set_numerics(small_config(Path("text"), 1, 1, 1, train=train), env)
    assert not torch.are_deterministic_algorithms_enabled()
    assert env == {}


def test_the_flight_recorder_writes_into_the_attempt_unless_the_user_says_where() -> None:
    env = {"TORCH_FR_DUMP_TEMP_FILE": "/elsewhere"}
    record_collectives(500, Path("attempt"), env)
    assert env == {"TORCH_FR_BUFFER_SIZE": "500", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": "/elsewhere"}
    off: dict[str, str] = {}
    record_collectives(0, Path("attempt"), off)
    assert off == {"TORCH_FR_BUFFER_SIZE": "0"}
