"""`hpcmoe plan` at the command line: text, JSON, exit status. Run in this process; no torch may come in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcmoe.cli.main import main
from hpcmoe.config.compose import load
from hpcmoe.config.validate import validate
from hpcmoe.planner.check import check

KEYS = {
    "layout", "world_size", "fits", "impossible", "memory_gib", "params_billion", "gflop_per_token", "step_time_s",
    "tokens_per_s_per_gpu", "mfu", "flops_convention", "peak_tflops", "bottleneck", "slurm", "alternatives", "assumptions",
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["plan", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json_has_every_key_that_scripts_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "model=mixtral_8x7b", "cluster=leonardo", "nodes=16", "--json")
    document = json.loads(out)
    assert status == 0
    assert set(document) >= KEYS
    sizes = {"pp", "dp_replicate", "dp_shard", "tp", "ep", "schedule", "microbatch", "recompute"}
    assert set(document["layout"]) == sizes | {"ep_placement"}
    assert set(document["memory_gib"]) == {"params", "grads", "optimizer", "activations", "buffers", "total", "limit"}
    assert set(document["slurm"]) == {"partition", "qos", "time"}
    assert document["params_billion"]["total"] == pytest.approx(46.70, abs=0.01)
    kinds = [document["memory_gib"][kind] for kind in ("params", "grads", "optimizer", "activations", "buffers")]
    assert sum(kinds) == pytest.approx(document["memory_gib"]["total"])


def test_the_text_draws_the_layout_and_names_its_conventions(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "model=mixtral_8x7b", "cluster=leonardo", "nodes=16", "--explain")
    assert status == 0
    for words in ("stage 0", "node", "[d0", "titan convention", "alternatives", "taken on trust", "queue", "hpcmoe submit"):
        assert words in out


def test_what_the_user_did_not_say_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "model=mixtral_8x7b", "cluster=leonardo", "nodes=16", "--json")
    said = " ".join(json.loads(out)["assumptions"])
    assert "precision=bf16, since none was given" in said
    assert "train.seq_len=4096, since none was given" in said


def test_a_given_layout_is_checked_and_costed_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=moe_32x4096", "cluster=jupiter", "nodes=4", "layout.tp=2", "layout.pp=2", "layout.ep=4", "--json"]
    status, out, _ = run(capsys, *words)
    layout = json.loads(out)["layout"]
    assert status == 0
    assert (layout["tp"], layout["pp"], layout["ep"], layout["dp_shard"]) == (2, 2, 4, 4)


def test_node_counts_are_compared_and_refusals_kept(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "model=moe_1t", "cluster=leonardo", "nodes=64..512", "--json")
    plans = json.loads(out)["plans"]
    assert status == 0
    assert [p["nodes"] for p in plans] == [64, 128, 256, 512]
    assert [p["fits"] for p in plans] == [False, True, True, False]
    assert "256 nodes" in plans[3]["impossible"][0]


def test_no_layout_that_fits_is_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "model=moe_1t", "cluster=leonardo", "nodes=16")
    assert status == 1
    assert "impossible: memory:" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["precision=fp8", "nodes=4"], "no FP8 units"),
        (["layout.tp=8", "nodes=4"], "layout.tp=8 needs 8 GPUs in one node"),
        (["layout.ep=3", "nodes=4"], "layout.ep=3 does not divide"),
        (["slurm.qos=normal", "nodes=65"], "normal takes at most 64 nodes"),
        (["nodes=9999"], "leonardo has 3456"),
        (["nodes=0..4"], "0 < LOW <= HIGH"),
        (["nodes=0"], "nodes=0 must be above zero"),
        (["train.seq_len=0"], "train.seq_len=0 must be above zero"),
        (["layout.microbatch=0"], "layout.microbatch=0 must be above zero"),
        (["layout.epp=3"], "layout.epp"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    status, out, err = run(capsys, "model=mixtral_8x7b", "cluster=leonardo", *words)
    assert status == 2
    assert line in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_plan_never_imports_torch() -> None:
    code = "import sys; from hpcmoe.cli.main import main; main(['plan', '--json']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_users_own_cluster_is_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "ours.yaml").write_text(
        "# @package _global_\n"
        "gpus_per_node: 8\n"
        "cluster:\n"
        "  name: ours\n"
        "  gpu: {model: H100-SXM5, mem_gib: 80, peak_tflops: {bf16: 989}, hbm_gb_s: 3350}\n"
        "  link: {intra_node_gb_s_per_gpu: 450, inter_node_gb_s_per_node: 400}\n"
        "  qos: {short: {max_nodes: 4, max_time: '02:00:00'}, long: {max_time: '1-0'}}\n"
    )
    words = ["--config-dir", str(tmp_path), "cluster=ours", "model=mixtral_8x7b", "nodes=8", "--json"]
    status, out, _ = run(capsys, *words)
    document = json.loads(out)
    assert status == 0
    assert document["world_size"] == 64
    assert document["slurm"]["qos"] == "long"
    assert any("figures of ours without a read source" in text for text in document["assumptions"])


@pytest.mark.parametrize("cluster", ["local", "leonardo"])
@pytest.mark.parametrize("named", [[], ["precision=fp32"]])
def test_plan_and_submit_train_in_the_same_precision(capsys: pytest.CaptureFixture[str], cluster: str, named: list[str]) -> None:
    words = [f"cluster={cluster}", "slurm.account=x", *named]
    _, out, _ = run(capsys, *words, "--json")
    frozen = validate(load(words)).precision.name
    assert frozen is not None
    assert json.loads(out)["precision"] == frozen.value == check(validate(load(words))).work.precision
