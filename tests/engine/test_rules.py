"""The engine's decisions that need no ranks: schedules, what to keep, who a rank is, which configs run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.config.schema import BatchWarmupConfig, LayoutConfig, OptimConfig, Precision, PrecisionConfig, TrainConfig
from hpcmoe.engine import manifest
from hpcmoe.engine.launch import check_world, read_launch
from hpcmoe.engine.peak import Peak, share_of_cores
from hpcmoe.engine.report import duration, quantity
from hpcmoe.engine.schedule import learning_rate
from hpcmoe.engine.stop import StopSignals
from hpcmoe.engine.support import check_engine
from hpcmoe.errors import UserError
from tests.engine.ranks import small_config, small_model


def rates(steps: list[int], **optim: Any) -> list[float]:
    return [round(learning_rate(step, 100, OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1, **optim)), 6) for step in steps]


def test_every_schedule_warms_up_linearly() -> None:
    for schedule in ("cosine", "wsd", "constant"):
        assert rates([1, 5, 10], schedule=schedule) == [0.1, 0.5, 1.0]


def test_cosine_falls_to_its_floor_wsd_stays_then_decays_constant_stays() -> None:
    assert rates([55, 100], schedule="cosine") == [0.55, 0.1]
    assert rates([60, 80, 90, 100], schedule="wsd", decay_steps=20) == [1.0, 1.0, 0.55, 0.1]
    assert rates([60, 100], schedule="constant") == [1.0, 1.0]


@pytest.mark.parametrize(
    ("steps", "newest", "keep_last", "keep_every", "gone"),
    [
        ([40, 30, 20, 10], 40, 2, None, [20, 10]),
        ([40, 30, 20, 10], 40, 2, 20, [10]),
        ([40, 30, 20], 30, 2, None, []),  # 40 was skipped as damaged: not counted, not touched
        ([40, 30, 20, 10], 30, 1, None, [20, 10]),
        ([10], 10, 1, None, []),
    ],
)
def test_the_last_few_checkpoints_and_every_so_many_th_are_kept(
    steps: list[int], newest: int, keep_last: int, keep_every: int | None, gone: list[int]
) -> None:
    assert manifest.to_delete(steps, newest, keep_last, keep_every) == gone


def written(folder: Path, step: int, attempt: str, content: bytes) -> None:
    tmp = folder / manifest.scrap_name(step, attempt, "tmp")
    tmp.mkdir(parents=True)
    (tmp / "part").write_bytes(content)
    manifest.publish(folder, step, attempt, manifest.record_files(tmp, ["part"]), {"tokens": 1})


def test_publishing_replaces_an_earlier_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    written(tmp_path, 5, "1.0", b"old")
    written(tmp_path, 5, "1.1", b"new!")
    assert sorted(os.listdir(tmp_path)) == ["step-00000005"]
    read = manifest.read_manifest(tmp_path / "step-00000005")
    assert isinstance(read, dict)
    assert manifest.damage(tmp_path / "step-00000005", read["files"], full=True) is None
    assert (tmp_path / "step-00000005" / "part").read_bytes() == b"new!"


def test_damage_is_named_by_file_and_kind(tmp_path: Path) -> None:
    written(tmp_path, 5, "1.0", b"content")
    folder = tmp_path / "step-00000005"
    read = manifest.read_manifest(folder)
    assert isinstance(read, dict)
    files = read["files"]
    (folder / "part").write_bytes(b"c0ntent")
    assert manifest.damage(folder, files, full=True) == "part does not match its checksum"
    assert manifest.damage(folder, files, full=False) is None, "size alone cannot see it"
    (folder / "part").write_bytes(b"short")
    assert manifest.damage(folder, files, full=False) == "part has 5 bytes, the manifest says 7"
    (folder / "part").unlink()
    assert manifest.damage(folder, files, full=False) == "part is missing"
    (folder / "manifest.json").write_text('{"format": 1, "fil')
    assert manifest.read_manifest(folder) == "manifest.json is missing or not JSON"


def test_scraps_of_other_attempts_are_swept_and_nothing_else(tmp_path: Path) -> None:
    written(tmp_path, 5, "12_3.0", b"x")
    names = [".step-00000006.12_3.0.tmp", ".step-00000006.12_3.1.tmp", ".step-00000001.12_3.0.gone", ".notes", "step-00000009"]
    for name in names:
        (tmp_path / name).mkdir()
    manifest.sweep_scraps(tmp_path, "12_3.1")
    assert sorted(os.listdir(tmp_path)) == [".notes", ".step-00000006.12_3.1.tmp", "step-00000005", "step-00000009"]
    assert manifest.published(tmp_path) == [9, 5]


SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "4(x2)"}
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


def test_a_rank_is_known_from_slurms_words_and_torchs_come_first() -> None:
    launch = read_launch(Path("run"), SLURM | MASTER | {"HPCMOE_ATTEMPT": "7.1"})
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (5, 8, 1, 4)
    assert (launch.attempt, launch.master_addr, launch.master_port) == ("7.1", "n1", 29500)
    ours = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read_launch(Path("run"), SLURM | MASTER | ours).rank == 2
    alone = read_launch(Path("run"), {})
    assert (alone.rank, alone.world_size) == (0, 1)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (SLURM, "without MASTER_ADDR"),
        ({"RANK": "0"}, "WORLD_SIZE=None"),
        ({"RANK": "x", "WORLD_SIZE": "1"}, "RANK='x'"),
    ],
)
def test_a_rank_that_is_half_described_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_launch(Path("run"), env)


def test_a_world_of_another_size_is_refused() -> None:
    launch = read_launch(Path("run"), SLURM | MASTER)
    check_world(launch, 8, 4)
    with pytest.raises(UserError, match="8 ranks were started, but the run is laid out for 16"):
        check_world(launch, 16, 4)
    with pytest.raises(UserError, match="4 ranks on one node, where 2 were expected"):
        check_world(launch, 8, 2)


def growing(sequences: int) -> TrainConfig:
    """From so many sequences a batch to 8 of them."""
    warmup = BatchWarmupConfig(start_tokens=32 * sequences, tokens=1000)
    return TrainConfig(steps=10, seq_len=32, global_batch_tokens=32 * 8, batch_warmup=warmup)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"layout": LayoutConfig(ep=1, dp_shard=2, microbatch=1)}, "the layout has 2 ranks, the run 4"),
        ({"layout": LayoutConfig(ep=3, dp_shard=4, microbatch=1)}, "layout.ep=3 must divide"),
        (
            {"layout": LayoutConfig(ep=1, dp_shard=4, microbatch=3)},
            "must be a multiple of 4 data-parallel ranks x layout.microbatch=3",
        ),
        ({"layout": LayoutConfig(ep=1, dp_shard=1, tp=4, microbatch=1)}, "layout.tp=4 does not divide model.kv_heads=2"),
        (
            {
                "model": small_model(layers=4),
                "layout": LayoutConfig(ep=1, dp_shard=2, pp=2, schedule="ZBVZeroBubble", microbatch=1, recompute="full"),
            },
            "layout.recompute=full does not go with layout.schedule=ZBVZeroBubble",
        ),
        (
            {"precision": PrecisionConfig(moments="bf16"), "optim": OptimConfig(lr=1.0, betas=[0.9, 0.999])},
            "bf16 rounds away what a moment of beta=0.999 changes",
        ),
        ({"layout": LayoutConfig()}, "submit resolves them"),
        (
            {"layout": LayoutConfig(pp=2, dp_shard=2, ep=1, microbatch=1), "train": growing(2)},
            "batch of 64 tokens: layout.schedule=1F1B with layout.pp=2 needs at least 2 microbatches a step and has 1",
        ),
        (
            {"train": growing(3)},
            "train.batch_warmup: a batch of 96 tokens is not a multiple of ranks x microbatch x seq_len = 256",
        ),
        ({"precision": PrecisionConfig(name=Precision.fp8)}, "this engine trains in bf16 or fp32"),
    ],
)
def test_a_config_the_engine_cannot_run_is_refused_before_any_rank_waits(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_engine(small_config(Path("text"), 4, 4, 10, **sections))


def test_sizes_follow_from_the_layout() -> None:
    sizes = check_engine(
        small_config(Path("text"), 4, 2, 10, layout=LayoutConfig(ep=2, dp_shard=2, dp_replicate=2, microbatch=1))
    )
    assert (sizes.efsdp, sizes.data_ranks, sizes.global_batch) == (1, 4, 8)


def test_signals_are_noted_and_nothing_more() -> None:
    kept = signal.getsignal(signal.SIGUSR2)
    try:
        signals = StopSignals().install([signal.SIGUSR2])
        assert signals.heard == []
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.heard == ["SIGUSR2"]
    finally:
        signal.signal(signal.SIGUSR2, kept)


def test_numbers_for_people_have_few_digits() -> None:
    assert [quantity(value) for value in (3.14159, 5120, 873_000, 46.7e9)] == ["3.14", "5.12k", "873k", "46.7G"]
    assert [duration(seconds) for seconds in (4.4, 92, 7260)] == ["4s", "1m32s", "2h01m"]
    assert str(Peak(0.0488, "fp32", "measured")) == "of 0.049 TFLOP/s fp32 measured"


def test_ranks_that_share_cores_share_their_peak() -> None:
    assert share_of_cores(local_ranks=4, threads=1, cores=2) == 0.5
    assert share_of_cores(local_ranks=4, threads=2, cores=64) == 1.0
