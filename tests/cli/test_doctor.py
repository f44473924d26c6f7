"""`hpcmoe doctor` from the outside: exit codes, JSON, the profile it writes, what it says where there is no Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcmoe.cli import doctor
from hpcmoe.cli.main import main
from hpcmoe.config.compose import compose, to_config
from hpcmoe.config.validate import validate
from hpcmoe.runs.journal import Journal
from tests.hpcmoe_slurm.fakes import RECORDED, FakeSlurm

TORCH = {"torch": "2.13.0", "torch_import_s": 3.0, "torch_gpus": 0, "torch_problem": None}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "import_torch", lambda: dict(TORCH))
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", "/usr/bin/none")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """The recorded site."""
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    for name in (*doctor.NEEDED, *doctor.WANTED):
        fake.answers(name)
    fake.runs("scontrol", f'[[ $2 == config ]] && cat "{RECORDED}/show_config.txt" || cat "{RECORDED}/show_partitions.txt"')
    fake.runs("sinfo", f'cat "{RECORDED}/sinfo.txt"')
    fake.runs("sacctmgr", f'[[ $* == *assoc* ]] && cat "{RECORDED}/sacctmgr_assoc.txt" || cat "{RECORDED}/sacctmgr_qos.txt"')
    return fake


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = doctor.main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def levels(document: dict[str, Any], topic: str) -> list[str]:
    return [one["level"] for one in document["findings"] if one["topic"] == topic]


def test_without_slurm_it_says_so_and_looks_at_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = asked(capsys)
    assert status == 0
    assert "not a Slurm cluster" in document["findings"][0]["says"]
    assert "ok" in levels(document, "run root")
    assert levels(document, "python") == ["ok"]


def test_a_slurm_cluster_without_slurm_is_bad_and_the_local_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, "cluster=leonardo")[0] == 1
    assert asked(capsys, "cluster=local")[0] == 0


def test_a_slurm_that_does_not_answer_is_bad(capsys: pytest.CaptureFixture[str], slurm: FakeSlurm) -> None:
    slurm.answers("scontrol", stderr="Unable to contact slurm controller (connect failure)", rc=1)
    status, document = asked(capsys)
    assert (status, document["worst"]) == (1, "bad")


def test_a_site_is_told_in_lines_with_their_cures(capsys: pytest.CaptureFixture[str], slurm: FakeSlurm) -> None:
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok       slurm       Slurm 22.05.8")
    account = next(index for index, line in enumerate(lines) if line.startswith("warn     account"))
    assert lines[account + 1].split() == [
        "->",
        *["set", "slurm.account=NAME,", "so", "that", "the", "right", "one", "is", "charged"],
    ]
    assert lines[-1].endswith("unknown")


def test_measured_saves_are_held_against_the_grace_time(
    capsys: pytest.CaptureFixture[str], slurm: FakeSlurm, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "abc123"
    run.mkdir(parents=True)
    Journal(run / "events.jsonl").append("planned", scheduler="slurm")
    Journal(run / "events.jsonl", "7.0").append("left", save_s=90.0)
    (run / "metrics.jsonl").write_text('{"step": 1, "seconds": 4.0}\n')
    status, document = asked(capsys)
    assert status == 1
    assert any("took 94.0 s, and 14 s are left" in one["says"] for one in document["findings"])


def test_a_missing_command_is_named(
    capsys: pytest.CaptureFixture[str], slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "NEEDED", ("squeue", "no-such-command"))
    status, document = asked(capsys)
    assert (status, document["findings"][0]["says"]) == (1, "not on this host: no-such-command")


def test_where_the_profile_and_slurm_disagree_is_said(capsys: pytest.CaptureFixture[str], slurm: FakeSlurm) -> None:
    _, document = asked(capsys, "cluster=testbed")
    assert levels(document, "profile") == ["ok"]
    rules = "+cluster.qos={fast:{kind:qos},high:{kind:partition,max_time:'1:00:00'}}"
    _, document = asked(capsys, "cluster=testbed", "cluster.nodes=8", "gpus_per_node=2", rules)
    says = [one["says"] for one in document["findings"] if one["topic"] == "profile"]
    assert says == [
        "cluster.nodes is 8 in the profile, and 4 in Slurm",
        "gpus_per_node is 2 in the profile, and 4 in Slurm",
        "Slurm has no qos 'fast', which the profile names",
        "high runs 1:00:00 in the profile, and 1-00:00:00 in Slurm",
    ]


def test_a_written_profile_is_a_cluster_that_submit_takes(
    capsys: pytest.CaptureFixture[str], slurm: FakeSlurm, tmp_path: Path
) -> None:
    path = tmp_path / "my_conf" / "cluster" / "here.yaml"
    status, document = asked(capsys, "--write", str(path))
    assert status == 0
    assert f"--config-dir {tmp_path / 'my_conf'} cluster=here" in document["findings"][-1]["says"]
    config = validate(to_config(compose(["cluster=here", "model=tiny"], str(tmp_path / "my_conf"))))
    assert (config.cluster.nodes, config.gpus_per_node, config.slurm.partition) == (4, 4, "requeue_grace")
    assert (config.cluster.gpu.model, config.cluster.gpu.mem_gib) == ("a100", None)
    values = yaml.safe_load(path.read_text())
    assert "gpu.mem_gib" in values["cluster"]["unverified"]
    assert values["cluster"]["sources"]["nodes"].startswith("Slurm on ")
    assert main(["doctor", "--write", str(path)]) == 2
    assert "it is there already" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--write", "here"), ("cluster=leonrdo",), ("--write", "x.yaml"), ("--frobnicate",)])
def test_wrong_words_are_refused_with_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
