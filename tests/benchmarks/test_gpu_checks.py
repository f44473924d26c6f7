"""The GPU checks say plainly when there is none, and their logic, which a CPU can run, finds what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_checks
from hpcmoe.engine.support import check_engine
from hpcmoe.models import experts
from hpcmoe.models.dispatch import RowLayout

CPU = torch.device("cpu")


def test_without_a_gpu_it_says_so_and_fails_nobody() -> None:
    script = Path(gpu_checks.__file__)
    environ = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    ran = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "no GPU here: nothing was checked\n")


def test_every_kernel_passes_on_a_cpu() -> None:
    checks = gpu_checks.check_kernels(CPU, 32)
    assert len(checks) == 6
    assert all(check.good for check in checks), "\n".join(map(str, checks))
    assert sum("chosen here" in check.detail for check in checks) == 2


def test_a_kernel_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def loses_an_expert(x: torch.Tensor, w: torch.Tensor, rows: RowLayout) -> torch.Tensor:
        out = original(x, w, rows)
        return torch.cat([out[: rows.starts[-1]], 0 * out[rows.starts[-1] :]])

    original = experts.MATMULS["padded_bmm"]
    monkeypatch.setitem(experts.MATMULS, "padded_bmm", loses_an_expert)
    bad = [check for check in gpu_checks.check_kernels(CPU, 32) if not check.good]
    assert {check.name for check in bad} == {"experts by padded_bmm"}
    assert str(bad[0]).startswith("FAIL experts by padded_bmm: torch.float32 worst relative error ")


def test_recompute_keeps_what_the_planner_says() -> None:
    checks = gpu_checks.check_recompute(CPU, 16)
    assert [check.name for check in checks] == ["recompute=none", "recompute=selective", "recompute=full"]
    assert all(check.good for check in checks), "\n".join(map(str, checks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_layout_can_be_run_by_its_world(ranks: int) -> None:
    for name, overrides in gpu_checks.layouts(ranks).items():
        world = int(name.split(":")[0])
        assert world <= ranks
        config = gpu_checks.config_of(world, overrides, "cpu")
        assert config.world_size == world
        check_engine(config)


def test_a_check_that_breaks_is_a_check_that_failed() -> None:
    def breaks() -> list[Any]:
        raise RuntimeError("no kernel image\nis available")

    (check,) = gpu_checks.guarded(breaks, "experts")
    assert str(check) == "FAIL experts: is available"
