"""`hpcmoe submit` without submitting: dry runs, Hydra's ways to look at a config, sweeps, mistakes that leave nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from hpcmoe.cli.main import main
from hpcmoe.config.key import config_key
from hpcmoe.runs.sweep import SweepDir, SweepPoint
from tests.hpcmoe_slurm.fakes import RECORDED, FakeSlurm
from tests.runs.sweeps import finished, planned, write_run, write_sweep

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that is the current one, and where runs would go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCMOE_RUNS", raising=False)
    return tmp_path


def answer(*arguments: str, capsys: Captured) -> str:
    assert main(["submit", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_dry_run_prints_script_and_config_and_writes_nothing(here: Path, capsys: Captured) -> None:
    text = answer("--dry-run", "train.steps=3", capsys=capsys)
    script, _, config = text.partition("# --- config.yaml ---\n")
    assert script.startswith("# --- job script ---\n#!/bin/bash\n")
    assert yaml.safe_load(config)["train"]["steps"] == 3
    assert list(here.iterdir()) == []


def test_a_dry_run_as_json_is_one_document(here: Path, capsys: Captured) -> None:
    document = json.loads(answer("cluster=testbed", "nodes=2", "--dry-run", "--json", capsys=capsys))
    assert set(document) == {"script", "config"}
    assert "#SBATCH --nodes=2" in document["script"]
    assert document["config"]["layout"]["dp_shard"] == 8


@pytest.mark.parametrize("cluster", ["local", "testbed", "leonardo"])
def test_the_script_of_every_profile_is_valid_bash(cluster: str, capsys: Captured) -> None:
    document = json.loads(answer(f"cluster={cluster}", "slurm.account=x", "--dry-run", "--json", capsys=capsys))
    checked = subprocess.run(["bash", "-n"], input=document["script"], text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_flags_and_overrides_may_come_in_any_order(capsys: Captured) -> None:
    document = json.loads(answer("train.steps=3", "--json", "nodes=1", "--dry-run", "train.seed=5", capsys=capsys))
    assert (document["config"]["train"]["steps"], document["config"]["train"]["seed"]) == (3, 5)


def test_cfg_shows_the_config_as_hydra_does(here: Path, capsys: Captured) -> None:
    shown = yaml.safe_load(answer("--cfg", "job", "train.steps=3", capsys=capsys))
    assert shown["train"]["steps"] == 3
    assert "hydra" not in shown
    assert answer("-c", "job", "-p", "checkpoint", capsys=capsys).startswith("# @package checkpoint\n")
    assert set(yaml.safe_load(answer("--cfg", "all", capsys=capsys))) > {"hydra", "train"}
    assert list(here.iterdir()) == []


def test_cfg_resolves_on_request(capsys: Captured) -> None:
    text = answer("--cfg", "job", "--resolve", "optim.warmup_steps=${train.steps}", "train.steps=7", capsys=capsys)
    assert yaml.safe_load(text)["optim"]["warmup_steps"] == 7


def test_help_names_our_flags_and_every_group(capsys: Captured) -> None:
    text = answer("--help", capsys=capsys)
    assert all(word in text for word in ("--wait", "--dry-run", "--json", "--multirun", "cluster: ", "leonardo", "experiment: "))


def test_a_config_dir_and_an_experiment_of_ones_own(here: Path, capsys: Captured) -> None:
    (here / "mine" / "experiment").mkdir(parents=True)
    (here / "mine" / "experiment" / "long.yaml").write_text("# @package _global_\ntrain:\n  steps: 12345\n")
    document = json.loads(answer("--config-dir", "mine", "+experiment=long", "--dry-run", "--json", capsys=capsys))
    assert document["config"]["train"]["steps"] == 12345


def test_a_dry_sweep_shows_every_point_and_writes_nothing(here: Path, capsys: Captured) -> None:
    text = answer("-m", "optim.lr=1e-4,3e-4", "train.seed=0,1", "--dry-run", "--json", capsys=capsys)
    document = json.loads(text)
    assert [(point["config"]["optim"]["lr"], point["config"]["train"]["seed"]) for point in document["points"]] == [
        (1e-4, 0),
        (1e-4, 1),
        (3e-4, 0),
        (3e-4, 1),
    ]
    assert list(here.iterdir()) == []


def test_a_dry_sweep_tells_the_whole_and_shows_a_script_for_each_shape(here: Path, capsys: Captured) -> None:
    words = [
        "cluster=testbed",
        "nodes=1,2",
        "train.seed=0,1,2",
        "slurm.time=60",
        "slurm.array_parallelism=2",
        "cluster.gres=true",
    ]
    text = answer("-m", *words, "--dry-run", capsys=capsys)
    lines = text.splitlines()
    assert lines[0].split() == ["POINT", "nodes", "train.seed", "GPUS", "TIME", "GPU-HOURS"]
    assert lines[1].split() == ["0", "1", "0", "4", "1h00m", "4.0"]
    assert lines[6].split() == ["5", "2", "2", "8", "1h00m", "8.0"]
    assert "6 runs in 2 arrays, about 36.0 GPU-hours" in lines
    assert "longest path, 2 at once: about 3h00m; waiting in the queue not counted" in lines
    assert [line for line in lines if line.startswith("# ---")] == [
        "# --- job script of points 0-2 ---",
        "# --- job script of points 3-5 ---",
    ]
    assert list(here.iterdir()) == []


def test_points_that_are_not_run_are_shown_as_such_and_cost_nothing(here: Path, capsys: Captured) -> None:
    words = ["-m", "cluster=testbed", "nodes=1", "train.seed=0,1,2", "slurm.time=60", "--dry-run"]
    told = json.loads(answer(*words, "--json", capsys=capsys))
    keys = [config_key(point["config"]) for point in told["points"]]
    write_run(here / "runs", "aaaaaa", planned(key=keys[0]), finished("COMPLETED"))
    (here / "runs" / "aaaaaa" / "result.json").write_text('{"state": "COMPLETED"}')
    write_sweep(here / "runs", [SweepPoint(0, (), keys[1], "bbbbbb")])
    lines = answer(*words, "--sweep", "swp001", capsys=capsys).splitlines()
    assert [line.partition("not run: ")[2] for line in lines[1:4]] == ["the same as run aaaaaa", "the same as run bbbbbb", ""]
    assert "1 run in 1 array, about 4.0 GPU-hours; 2 more not run, as there are such runs" in lines
    again = answer(*words, "sweep.skip_finished=false", capsys=capsys)
    assert "3 runs in 1 array, about 12.0 GPU-hours" in again.splitlines()


def test_every_impossible_point_is_named_before_anything_is_written(here: Path, capsys: Captured) -> None:
    assert main(["submit", "-m", "train.steps=5,-1", "layout.ep=4,3", "model=tiny"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("hpcmoe: 3 of 4 points cannot be run, and none is submitted: ")
    assert "point 1 (train.steps=5 layout.ep=3 model=tiny): layout.ep=3 must divide" in line
    assert "points 2-3 (train.steps=-1 model=tiny): train.steps=-1 must be above zero" in line
    assert line.count("\n") == 1
    assert list(here.iterdir()) == []


def test_a_sweep_is_where_hydra_says_and_not_what_was_typed(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(here / "bin", monkeypatch)
    fake.answers("sbatch", "41\n")
    for command in ("srun", "squeue", "sacctmgr"):
        fake.answers(command)
    fake.runs("scontrol", f'cat "{RECORDED / "show_config.txt"}"')
    directory = "hydra.sweep.dir='mine/${hydra.job.config_name}'"
    told = json.loads(answer("-m", directory, "cluster=testbed", "train.seed=0,1", "--json", capsys=capsys))
    assert told["sweep_dir"] == str(here / "mine" / "config")
    assert len(SweepDir(here / "mine" / "config").read_points()) == len(told["runs"]) == 2


def test_a_users_own_sweeper_settings_are_honoured(here: Path, capsys: Captured) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "grid.yaml").write_text(
        "defaults: [config, _self_]\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      train.seed: 1,2,3\n"
    )
    text = answer("-m", "--config-dir", "mine", "--config-name", "grid", "--dry-run", "--json", capsys=capsys)
    assert [run["config"]["train"]["seed"] for run in json.loads(text)["points"]] == [1, 2, 3]


MISTAKES = [
    (["optim.lrr=1"], "no config key 'optim.lrr'; did you mean 'optim.lr'?"),
    (["nodes=two"], "nodes=two: not a whole number"),
    (["layout.ep=3"], "layout.ep=3 must divide model.experts=8"),
    (["--wiat"], "submit: unrecognized arguments: --wiat"),
    (["--cfg", "jobs"], "submit: argument --cfg/-c: invalid choice: 'jobs'"),
    (["--cfg", "job", "-p", "optm"], "no config key 'optm'; did you mean 'optim'?"),
    (["--cfg", "job", "-m"], "--multirun and --cfg do not go together"),
    (["--resolve"], "--resolve goes with --cfg or --help"),
    (["--config-dir", "nowhere"], "config directory "),
    (["-m", "optim.lr=1e-4,x"], "x"),
    (["-m", "train.seed=0,1", "layout.ep=3"], "all 2 points (layout.ep=3): layout.ep=3 must divide model.experts=8"),
    (
        ["-m", "train.seed=0,1", "layout.ep=3,4", "+train.sed=1"],
        "all 4 points (+train.sed=1): no config key 'train.sed'; did you mean 'train.seed'?",
    ),
    (["-m", "train.seed=0,1", "hydra/launcher=basic"], "a sweep of hpcmoe is submitted by hydra/launcher=hpcmoe"),
]


@pytest.mark.parametrize("as_json", [False, True], ids=["plain", "json"])
@pytest.mark.parametrize(("arguments", "line"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_exit_2_and_leaves_nothing(
    arguments: list[str], line: str, as_json: bool, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *arguments, *(["--json"] if as_json else [])]) == 2
    said = capfd.readouterr()
    last = said.err.splitlines()[-1]
    assert last.startswith("hpcmoe: ")
    assert line in last
    assert said.out == "" if not as_json else json.loads(said.out) == {"error": last.removeprefix("hpcmoe: ")}
    assert list(here.iterdir()) == []
