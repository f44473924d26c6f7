"""hydra/launcher=hpcmoe_local and hpcmoe_slurm under Hydra apps that know nothing of hpcmoe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf

from hpcmoe.config.sweep_loader import SweepLoader
from hpcmoe.errors import UserError
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import raw_config, result_state
from hpcmoe.runs.sweep import find_sweep
from hydra_plugins.hpcmoe_launchers._app_sweep import AppSweep
from hydra_plugins.hpcmoe_launchers.app_launcher import HpcmoeSlurmLauncher
from tests.hpcmoe_slurm.fakes import RECORDED, FakeSlurm

PATIENCE_S = 600.0

APP = """
import json, logging, os, sys, threading
import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from omegaconf import OmegaConf
import beside  # lies beside the script, not in the directory that it is started from

OmegaConf.register_new_resolver("twice", lambda number: 2 * number)
log = logging.getLogger("my_app")

class Refused(Exception):
    def __init__(self, x, why):
        super().__init__(f"x={x} is refused: {why}")

@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(cfg):
    log.info("x is %s", cfg.x)
    hydra_cfg = HydraConfig.get()
    facts = dict(
        x=cfg.x, twice=cfg.twice, job=cfg.job, num=hydra_cfg.job.num, id=hydra_cfg.job.id, out=hydra_cfg.runtime.output_dir,
        cwd=os.getcwd(), original=get_original_cwd(), choice=hydra_cfg.runtime.choices.db, env=os.environ.get("FROM_HYDRA"),
        restarts=os.environ["HPCMOE_RESTARTS"], run=os.environ["HPCMOE_RUN_DIR"], beside=beside.WORD, pid=os.getpid(),
    )
    open("facts.json", "w").write(json.dumps(facts))
    if cfg.x == 13:
        raise beside.Unlucky(f"{cfg.x} brings bad luck")
    if cfg.x == 14:
        raise Refused(cfg.x, "it is even")
    if cfg.x == 15:
        sys.exit(3)
    if cfg.x == 16:
        return threading.Lock()
    return cfg.x * 10

if __name__ == "__main__":
    main()
"""

CONFIG = """
defaults: [{db: mysql}, _self_]
x: 1
twice: ${twice:${x}}
job: ${hydra:job.name}-${hydra:job.num}
hydra:
  sweep: {dir: "out/${now:%H-%M-%S-%f}", subdir: "${hydra.job.num}_${hydra.job.override_dirname}"}
  job: {chdir: true, env_set: {FROM_HYDRA: "yes"}}
"""


# A sweeper of a user's own: two batches, the second of which goes by what the first returned.
SWEEPER = """
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class AskTell(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        first = self.launcher.launch([["x=14", *arguments], ["x=20", *arguments], ["x=16"]], initial_job_idx=0)
        second = self.launcher.launch([[f"x={first[1].return_value + 1}"]], initial_job_idx=3)
        for done in [*first, *second]:
            print("TOLD", done.status.name, repr(done._return_value), list(done.overrides))

node = {"_target_": "hydra_plugins.ask_tell.AskTell"}
ConfigStore.instance().store(group="hydra/sweeper", name="ask_tell", node=node, provider="me")
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script with its configs, and a module beside it."""
    folder = tmp_path_factory.mktemp("it's an app")
    for name in ("conf/db", "plugins/hydra_plugins"):
        (folder / name).mkdir(parents=True)
    (folder / "app.py").write_text(APP)
    (folder / "beside.py").write_text("WORD = 'found'\nclass Unlucky(ValueError): pass\n")
    (folder / "conf" / "app.yaml").write_text(CONFIG)
    (folder / "plugins" / "hydra_plugins" / "ask_tell.py").write_text(SWEEPER)
    for db in ("mysql", "postgres"):
        (folder / "conf" / "db" / f"{db}.yaml").write_text(f"name: {db}\n")
    return folder / "app.py"


def command(app: Path, *words: str) -> list[str]:
    return [sys.executable, str(app), "-m", *words]


def environment(app: Path, cwd: Path) -> dict[str, str]:
    """Its runs go to ./runs of where it is started."""
    path = f"{app.parent / 'plugins'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**os.environ, "HPCMOE_RUNS": str(cwd / "runs"), "PYTHONPATH": path}


def start(app: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(app, *words), cwd=cwd, env=environment(app, cwd), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


Swept = tuple[subprocess.CompletedProcess[str], Path]


@pytest.fixture(scope="module")
def swept(app: Path, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Hydra's own sweeper, started somewhere else; one of three points raises."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    return start(app, cwd, "hydra/launcher=hpcmoe_local", "x=13,12", "db=postgres"), cwd


@pytest.fixture(scope="module")
def asked(app: Path, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    cwd = tmp_path_factory.mktemp("asked")
    return start(app, cwd, "hydra/launcher=hpcmoe_local", "hydra/sweeper=ask_tell", "db=postgres"), cwd


def facts(cwd: Path, number: int) -> dict[str, Any]:
    (found,) = cwd.glob(f"out/*/{number}_*/facts.json")
    return dict(json.loads(found.read_text()))


def runs(cwd: Path) -> list[RunDir]:
    return find_sweep("latest", cwd / "runs").runs()


def test_a_point_runs_as_hydras_own_launcher_would_run_it(swept: Swept) -> None:
    _, cwd = swept
    told = facts(cwd, 1)
    out = Path(told["out"])
    assert out.name == "1_db=postgres,x=12"
    varying = {name: told.pop(name) for name in ("id", "pid", "run")}
    assert varying["id"].startswith("local-")
    assert told == {
        "x": 12, "twice": 24, "job": "app-1", "num": 1, "out": str(out), "cwd": str(out), "original": str(cwd),
        "choice": "postgres", "env": "yes", "restarts": "0", "beside": "found",
    }  # fmt: skip
    assert "[my_app][INFO] - x is 12" in (out / "app.log").read_text()
    assert "x: 12" in (out / ".hydra" / "config.yaml").read_text()


def test_each_point_is_a_run_with_a_process_and_a_directory_of_its_own(swept: Swept) -> None:
    _, cwd = swept
    assert len({facts(cwd, number)["pid"] for number in range(2)}) == 2
    assert [facts(cwd, number)["run"] for number in range(2)] == [str(run.path) for run in runs(cwd)]
    points = find_sweep("latest", cwd / "runs").read_points()
    assert [point.overrides for point in points] == [("x=13", "db=postgres"), ("x=12", "db=postgres")]


def test_a_task_that_raises_fails_at_once_everywhere_and_hides_no_other(swept: Swept) -> None:
    done, cwd = swept
    assert done.returncode == 1
    assert "beside.Unlucky: 13 brings bad luck" in done.stderr
    assert "#0 (x=13 db=postgres)" in done.stdout
    assert "1 of 2 points completed" in done.stdout
    assert [result_state(run) for run in runs(cwd)] == ["FAILED", "COMPLETED"]
    (log,) = runs(cwd)[0].path.glob("attempts/*/rank-0000.log")  # one attempt: to try again would not help
    assert 'raise beside.Unlucky(f"{cfg.x} brings bad luck")' in log.read_text()
    assert json.loads(runs(cwd)[0].result.read_text())["reason"] == "Unlucky: 13 brings bad luck"


def test_the_task_is_written_once_a_sweep_and_a_point_s_words_are_in_its_command(asked: Swept) -> None:
    _, cwd = asked
    sweep = find_sweep("latest", cwd / "runs")
    assert [path.name for path in sweep.path.glob("task/*")] == ["0.pickle"]
    assert len(list(sweep.shared.iterdir())) == 1, "provenance, of both batches"
    commands = [raw_config(run)["engine"]["command"] for run in runs(cwd)]
    assert [words[4:] for words in commands] == [
        ["0", "x=14", "db=postgres"], ["1", "x=20", "db=postgres"], ["2", "x=16"], ["3", "x=201"]
    ]  # fmt: skip
    assert len({tuple(words[:4]) for words in commands}) == 1


def test_a_sweeper_gets_values_and_exceptions_and_may_launch_again(asked: Swept) -> None:
    done, cwd = asked
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("TOLD")]
    assert told[1] == "TOLD COMPLETED 200 ['x=20', 'db=postgres']"
    assert told[3] == "TOLD COMPLETED 2010 ['x=201']"
    assert [result_state(run) for run in runs(cwd)] == ["FAILED", "COMPLETED", "FAILED", "COMPLETED"]


def test_what_cannot_travel_back_is_told_in_words(asked: Swept) -> None:
    done, _ = asked
    told = [line for line in done.stdout.splitlines() if line.startswith("TOLD FAILED")]
    assert "Refused: x=14 is refused: it is even" in told[0]  # its __init__ wants two arguments, and a pickle has one
    assert "return value (lock) cannot be pickled" in told[1]


def test_a_task_that_is_done_is_not_done_again(swept: Swept) -> None:
    """As after a preemption that came between the task's end and its job's."""
    _, cwd = swept
    run = runs(cwd)[1]
    environ = {**os.environ, "HPCMOE_RUN_DIR": str(run.path), "HPCMOE_ATTEMPT": "99.1", "HPCMOE_FATAL": str(cwd / "fatal")}
    again = subprocess.run(raw_config(run)["engine"]["command"], cwd=cwd, env=environ, capture_output=True, text=True, check=True)
    assert "done already" in again.stdout
    assert facts(cwd, 1)["restarts"] == "0"


# ---- hpcmoe_slurm, with a Slurm that is played ---------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.answers("sbatch", "41\n")
    fake.answers("srun")
    fake.answers("sacct")
    fake.runs("squeue", "sleep 1")
    fake.runs("scontrol", f'cat "{RECORDED / "show_config.txt"}"')
    return fake


def test_a_detached_sweep_returns_at_once(app: Path, slurm: FakeSlurm, tmp_path: Path) -> None:
    done = start(app, tmp_path, "hydra/launcher=hpcmoe_slurm", "hydra.launcher.detach=true", "x=1,2")
    assert done.returncode == 0, done.stderr
    sweep = find_sweep("latest", tmp_path / "runs")
    assert f"hpcmoe sweep status {sweep.sweep_id}" in done.stdout
    (array,) = sweep.sbatch.glob("array-*.sh")
    assert "#SBATCH --array=0-1%256" in array.read_text()
    assert len(slurm.calls("sbatch")) == 1
    assert sweep.path.parent == tmp_path / "out"  # where the app's own hydra.sweep.dir says


def test_an_interrupt_leaves_the_jobs_alone_and_says_how_to_follow_them(app: Path, slurm: FakeSlurm, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(app, "hydra/launcher=hpcmoe_slurm", "x=1,2"), cwd=tmp_path, env=environment(app, tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while not slurm.calls("squeue"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert f"hpcmoe sweep wait {find_sweep('latest', tmp_path / 'runs').sweep_id}" in said
    assert "Traceback" not in said
    assert not slurm.calls("scancel")


def test_an_app_s_points_are_composed_once_where_they_differ_in_plain_values(tmp_path: Path) -> None:
    """Hydra's sweepers ask the context that the launcher was set up with."""
    (tmp_path / "app.yaml").write_text("lr: 1\ntwice: [1, 2]\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks())
        HpcmoeSlurmLauncher().setup(hydra_context=context, task_function=lambda _: None, config=OmegaConf.create({}))
        assert isinstance(context.config_loader, SweepLoader)
        master = context.config_loader.load_configuration("app", ["hydra.job.name=app"], RunMode.MULTIRUN)
        points = [context.config_loader.load_sweep_config(master, [f"lr={lr}"]) for lr in (2, 3)]
    assert [(point.lr, point.hydra.job.override_dirname) for point in points] == [(2, "lr=2"), (3, "lr=3")]


def test_a_sweeper_that_needs_values_is_not_detached(app: Path, slurm: FakeSlurm, tmp_path: Path) -> None:
    sweeper = {"_target_": "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"}
    hydra = {"sweep": {"dir": str(tmp_path)}, "sweeper": sweeper, "hydra_logging": None, "verbose": False}
    config = OmegaConf.create({"hydra": hydra})
    sweep = AppSweep("slurm", {"detach": True}, config, None, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="return values"):
        sweep.launch([["x=1"]], 0)
    assert not slurm.calls("sbatch")
