"""The doctor's job: what it asks of Slurm, and what a node's answer means."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpcmoe.runs import nodejob
from hpcmoe.runs.nodejob import judge, look_at_a_node
from hpcmoe.slurm.facts import SEPARATOR
from hpcmoe.slurm.probe import Asks
from tests.hpcmoe_slurm.fakes import FakeSlurm

GOOD: dict[str, Any] = {
    "host": "lrdn0001",
    "python": "3.11.7",
    "commands": ["sbatch", "scontrol", "squeue", "sacct", "srun"],
    "scontrol_answers": True,
    "gpus": 1,
    "file_system": "lustre",
    "torch": "2.13.0",
    "torch_import_s": 12.0,
    "torch_gpus": 1,
    "torch_problem": None,
}


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "PyTorch sees 1 GPU, as asked"),
        ({"torch_gpus": 0}, "bad", "1 GPU, and PyTorch sees none"),
        ({"torch_gpus": 0, "gpus": 0}, "bad", "asked for a GPU and got none"),
        ({"torch": None, "torch_problem": "No module named 'torch'"}, "bad", "cannot be imported: No module named 'torch'"),
        ({"torch_import_s": 90.0}, "warn", "imported in 90.0 s"),
        ({"scontrol_answers": False}, "warn", "submits its successor instead"),
        ({"commands": []}, "warn", "neither scontrol nor sbatch"),
    ],
)
def test_what_a_node_s_answer_means(changed: dict[str, Any], level: str, words: str) -> None:
    found = list(judge(GOOD | changed, gpus=True))
    assert any(one.level == level and words in one.says for one in found), found
    assert level == "ok" or len([one for one in found if one.level != "ok"]) == 1


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(nodejob, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(nodejob, "LATE_FILE_S", 0.05)
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def test_the_job_runs_with_the_cluster_s_setup_and_leaves_nothing(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    python = tmp_path / "python"  # of the node
    python.write_text(f'#!/bin/sh\necho "$A $FROM_SETUP $1 $2" >{tmp_path}/heard\ncp {tmp_path}/good.json "$3"\n')
    python.chmod(0o755)
    monkeypatch.setattr(nodejob.sys, "executable", str(python))
    done, row = tmp_path / "done", SEPARATOR.join(["7", "RUNNING", "None", "1", "2", "3", "1", "n1", "me", "x", ""])
    slurm.runs("sbatch", f'cp "${{@: -1}}" {tmp_path}/sent.sh; (bash "${{@: -1}}"; touch {done}) >/dev/null 2>&1 & echo 7')
    slurm.runs("squeue", f"[ -e {done} ] || echo '{row}'")
    asks = Asks(partition="boost", account="me")
    found = look_at_a_node(tmp_path / "a run root", asks, True, ["export FROM_SETUP=1"], {"A": "b c"}, 120.0)
    sent = (tmp_path / "sent.sh").read_text()
    assert re.findall(r"#SBATCH --(\S+)", sent)[:4] == ["job-name=hpcmoe-doctor", "nodes=1", "ntasks=1", "time=10"]
    assert "#SBATCH --partition=boost\n#SBATCH --account=me\n#SBATCH --gres=gpu:1\n" in sent
    assert (tmp_path / "heard").read_text() == "b c 1 -m hpcmoe.runs.nodecheck\n"
    assert {one.level for one in found} == {"ok"}
    assert list((tmp_path / "a run root").iterdir()) == []


def test_a_job_that_ends_without_an_answer_gives_its_last_words(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.runs(
        "sbatch",
        'echo "line one" >"$(dirname "${@: -1}")/job.log"; echo "python: not found" >>"$(dirname "${@: -1}")/job.log"; echo 7',
    )
    slurm.answers("squeue", SEPARATOR.join(["7", "FAILED", "NonZeroExitCode", "1", "2", "3", "1", "n1", "me", "x", ""]) + "\n")
    [finding] = look_at_a_node(tmp_path / "runs", Asks(), False, [], {}, 30.0)
    assert (finding.level, finding.says) == ("bad", "job 7 ended as FAILED: python: not found")


def test_a_job_that_waits_too_long_is_cancelled_and_nothing_is_concluded(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("sbatch", "7\n")
    slurm.answers("scancel")
    slurm.answers("squeue", SEPARATOR.join(["7", "PENDING", "Priority", "1", "2", "3", "1", "", "me", "x", ""]) + "\n")
    [finding] = look_at_a_node(tmp_path / "runs", Asks(), False, [], {}, 0.2)
    assert finding.level == "unknown"
    assert "was PENDING (Priority)" in finding.says
    assert slurm.calls("scancel") == ["7"]


def test_a_refused_job_is_bad(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("sbatch", stderr="sbatch: error: Invalid account or account/partition combination specified", rc=1)
    [finding] = look_at_a_node(tmp_path / "runs", Asks(), False, [], {}, 5.0)
    assert finding.level == "bad"
    assert "Invalid account" in finding.says
