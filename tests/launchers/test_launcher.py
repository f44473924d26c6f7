"""A Hydra multirun through hydra/launcher=hpcmoe: all points are checked first, alike ones share an array."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcmoe.config.compose import opened_hydra
from hpcmoe.errors import UserError
from hpcmoe.locks import file_lock
from hpcmoe.runs.journal import read_journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import finish
from hpcmoe.runs.sweep import SweepDir
from hydra_plugins.hpcmoe_launchers import _sweep
from tests.hpcmoe_slurm.fakes import RECORDED, FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.runs("sbatch", f'echo $((40 + $(wc -l <"{fake.folder}/sbatch.log")))')
    for command in ("srun", "squeue", "sacctmgr"):
        fake.answers(command)
    fake.runs("scontrol", f'cat "{RECORDED / "show_config.txt"}"')
    monkeypatch.setenv("HPCMOE_RUNS", str(tmp_path / "runs"))
    return fake


def sweep(tmp_path: Path, *overrides: str, name: str = "one") -> list[dict[str, str]]:
    words = ["hydra/launcher=hpcmoe", f"hydra.sweep.dir={tmp_path / 'runs' / 'sweeps' / name}", "cluster=testbed", *overrides]
    with opened_hydra() as hydra:
        batches = hydra.multirun("config", lambda _: None, words, with_log_configuration=False)
    return [point.return_value for batch in batches for point in batch]


def run_dirs(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "runs").glob("*/events.jsonl"))


def test_points_that_slurm_sees_alike_are_one_array(slurm: FakeSlurm, tmp_path: Path) -> None:
    values = sweep(tmp_path, "optim.lr=1e-4,3e-4", "train.seed=0,1")
    assert [value["job_id"] for value in values] == ["41_0", "41_1", "41_2", "41_3"]
    assert len(slurm.calls("sbatch")) == 1
    assert [str(run.path) for run in SweepDir(tmp_path / "runs" / "sweeps" / "one").runs()] == [v["run_dir"] for v in values]


def test_points_of_different_shape_are_several_jobs_and_keep_their_order(slurm: FakeSlurm, tmp_path: Path) -> None:
    values = sweep(tmp_path, "nodes=1,2", "train.seed=0,1")
    assert [value["job_id"] for value in values] == ["41_0", "41_1", "42_0", "42_1"]
    values = sweep(tmp_path, "slurm.partition=high,cancel_grace", name="two")
    assert [value["job_id"] for value in values] == ["43", "44"]


def test_each_run_knows_its_point_and_its_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    for seed, value in enumerate(sweep(tmp_path, "train.seed=0,1")):
        run = Path(value["run_dir"])
        assert f"train.seed={seed}" in (run / "overrides.txt").read_text().splitlines()
        submitted = [event for event in read_journal(run / "events.jsonl") if event["event"] == "submitted"]
        assert [(event["job_id"], event["how"]) for event in submitted] == [(f"41_{seed}", "sweep")]


def test_a_sweep_remembers_what_was_typed_also_where_only_a_point_can_resolve_it(slurm: FakeSlurm, tmp_path: Path) -> None:
    words = "engine.command=[bash,train.sh,'${user.lr}']"
    values = sweep(tmp_path, "engine=command", words, "+user.lr=1,2")
    assert words in SweepDir(tmp_path / "runs" / "sweeps" / "one").facts["overrides"]
    assert "- '2'" in (Path(values[1]["run_dir"]) / "config.yaml").read_text()


def test_one_bad_point_and_nothing_is_written_or_submitted(slurm: FakeSlurm, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="point 1"):
        sweep(tmp_path, "train.steps=60,-1")
    assert run_dirs(tmp_path) == []
    assert slurm.calls("sbatch") == []


def test_a_refused_array_leaves_no_runs_and_says_why(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("sbatch", stderr="sbatch: error: invalid partition specified: nono", rc=1)
    with pytest.raises(UserError, match="invalid partition"):
        sweep(tmp_path, "train.seed=0,1")
    assert run_dirs(tmp_path) == []


def test_a_sweep_beyond_the_site_s_array_limit_becomes_several_arrays(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("scontrol", "MaxArraySize            = 2\n")
    values = sweep(tmp_path, "train.seed=0,1,2")
    assert [value["job_id"] for value in values] == ["41_0", "41_1", "42"]


def test_batches_of_a_sweeper_do_not_overwrite_each_other(slurm: FakeSlurm, tmp_path: Path) -> None:
    sweep(tmp_path, "train.seed=0,1,2,3", "hydra.sweeper.max_batch_size=2")
    scripts = sorted(path.name for path in (tmp_path / "runs" / "sweeps" / "one" / "sbatch").glob("array-*.sh"))
    assert scripts == ["array-0.sh", "array-1.sh"]


def test_points_that_a_sweep_has_and_those_with_a_result_are_not_run_again(slurm: FakeSlurm, tmp_path: Path) -> None:
    first = sweep(tmp_path, "train.seed=0,1")
    added = sweep(tmp_path, "train.seed=1,2", "slurm.time=1:00:00")
    assert [value.get("same_as") for value in added] == [first[1]["run_id"], None]
    assert [point.index for point in SweepDir(tmp_path / "runs" / "sweeps" / "one").read_points()] == [0, 1, 2]
    finish(RunDir(Path(first[0]["run_dir"])), "COMPLETED", None)
    other = sweep(tmp_path, "train.seed=0,1", name="two")
    assert [value.get("same_as") for value in other] == [first[0]["run_id"], None]
    again = sweep(tmp_path, "train.seed=0", "sweep.skip_finished=false", name="three")
    assert again[0]["run_id"] not in {value["run_id"] for value in [*first, *added, *other]}


def test_what_holds_for_the_whole_sweep_cannot_be_swept_over(slurm: FakeSlurm, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"slurm\.array_parallelism is 1 for one point and 2 for another"):
        sweep(tmp_path, "slurm.array_parallelism=1,2")
    assert slurm.calls("sbatch") == []


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("sweep.halving.first_rung=30", "sweep.halving.first_rung is null in sweep one and 30 for the points that are added"),
        ("sweep.max_failures=2", "sweep.max_failures is 1 in sweep one and 2 for"),
        ("cluster=local", "cluster.scheduler is slurm in sweep one and local for"),
        ("slurm.array_parallelism=7", "slurm.array_parallelism is 3 in sweep one and 7 for .*`hpcmoe sweep throttle one`"),
    ],
)
def test_added_points_keep_to_what_their_sweep_keeps_to(slurm: FakeSlurm, tmp_path: Path, word: str, answer: str) -> None:
    sweep(tmp_path, "train.seed=0", "sweep.max_failures=1", "slurm.array_parallelism=2")
    one = SweepDir(tmp_path / "runs" / "sweeps" / "one")
    one.journal("throttle", to=3)
    words = ["train.seed=1", "sweep.max_failures=1", "slurm.array_parallelism=3"]
    with pytest.raises(UserError, match=answer):
        sweep(tmp_path, *words, word)
    assert len(one.read_points()) == len(slurm.calls("sbatch")) == 1
    sweep(tmp_path, *words, "sweep.skip_finished=false")
    assert len(one.read_points()) == 2


def test_batches_of_a_sweeper_keep_to_what_the_first_does(slurm: FakeSlurm, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sweep\.max_failures is 1 in sweep one and 2 for"):
        sweep(tmp_path, "sweep.max_failures=1,2", "hydra.sweeper.max_batch_size=1")
    with pytest.raises(UserError, match=r"cluster\.scheduler is slurm for one point and local for another"):
        sweep(tmp_path, "cluster=testbed,local", name="two")


@pytest.mark.parametrize(("event", "why"), [("stopped", "is stopped: 2 runs FAILED"), ("cancelled", "is cancelled")])
def test_a_sweep_that_is_stopped_takes_no_points_until_it_is_resumed(
    slurm: FakeSlurm, tmp_path: Path, event: str, why: str
) -> None:
    sweep(tmp_path, "train.seed=0")
    one = SweepDir(tmp_path / "runs" / "sweeps" / "one")
    one.journal(event, reason="2 runs FAILED")
    with pytest.raises(UserError, match=f"{why}; `hpcmoe sweep resume one`"):
        sweep(tmp_path, "train.seed=1")
    assert len(one.read_points()) == len(run_dirs(tmp_path)) == len(slurm.calls("sbatch")) == 1
    one.journal("resumed", points=[])
    assert sweep(tmp_path, "train.seed=1")[0]["index"] == 1


def test_one_at_a_time_adds_points_to_a_sweep(slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(tmp_path, "train.seed=0")
    one = SweepDir(tmp_path / "runs" / "sweeps" / "one")
    monkeypatch.setattr(_sweep, "LOCK_WAIT_S", 0.0)
    with file_lock(one.lock) as mine:
        assert mine
        with pytest.raises(UserError, match="being submitted by another process"):
            sweep(tmp_path, "train.seed=1")
    assert len(one.read_points()) == len(run_dirs(tmp_path)) == 1


def test_another_hydra_app_gets_one_clear_line(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(
        "import hydra\n@hydra.main(version_base='1.3', config_path=None)\ndef main(cfg): pass\nmain()\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, str(app), "-m", "hydra/launcher=hpcmoe", "+x=1,2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "does not start from the schema" in done.stderr


def test_discovery_of_the_plugin_imports_neither_torch_nor_submitit() -> None:
    program = (
        "import json, sys\nfrom hpcmoe.resources import make_plugins_importable\nmake_plugins_importable()\n"
        "from hydra.core.plugins import Plugins\nnames = [c.__name__ for c in Plugins.instance().discover()]\n"
        "print(json.dumps([names, sorted(set(sys.modules) & {'torch', 'submitit', 'jinja2'})]))"
    )
    names, heavy = json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert {"HpcmoeLauncher", "HpcmoeSlurmLauncher", "HpcmoeLocalLauncher"} <= set(names)
    assert heavy == []
