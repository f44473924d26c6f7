"""A checkout, an editable install and a wheel all find conf/, slurm_templates/ and the launcher, from any working directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
Install = Callable[[str], Path]


def pip(*arguments: str | Path, python: Path | None = None) -> None:
    target = ["--python", str(python)] if python else []
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *target, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Install:
    """A function from a way of installing to the python of a fresh environment; what hpcmoe depends on is this environment's.

    This environment's packages come last there, by a .pth file, so that an hpcmoe of its own is never the one that is tested.
    """
    pythons: dict[str, Path] = {}

    def python_of(way: str) -> Path:
        if way in pythons:
            return pythons[way]
        folder = tmp_path_factory.mktemp(way)
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        python = folder / "bin" / "python"
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "zz_outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        if way == "wheel":
            pip("install", "--no-deps", "--force-reinstall", wheel, python=python)
        elif way == "editable":
            pip("install", "--no-deps", "--no-build-isolation", "--force-reinstall", "-e", ROOT, python=python)
        pythons[way] = python
        return python

    return python_of


def hpcmoe(way: str, installed: Install, cwd: Path, *arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HPCMOE_RUNS")}
    python = installed(way)
    if way == "checkout":
        environ["PYTHONPATH"] = str(ROOT)
        command = [str(python), "-m", "hpcmoe"]
    else:
        command = [str(python.parent / "hpcmoe")]
    done = subprocess.run([*command, *arguments], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


WAYS = ["checkout", "editable", "wheel"]


@pytest.mark.parametrize("way", WAYS)
def test_the_installation_that_runs_is_the_one_that_is_meant(way: str, installed: Install, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT) if way == "checkout" else ""}
    code = "import hpcmoe.resources as r; print(r.resource_dir('conf')); print(r.resource_dir('slurm_templates'))"
    done = subprocess.run(
        [str(installed(way)), "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    home = installed(way).parent.parent if way == "wheel" else ROOT
    assert all(Path(line).is_relative_to(home) and Path(line).is_dir() for line in done.stdout.splitlines())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cluster", ["local", "testbed"])
def test_a_run_can_be_planned_from_any_directory(way: str, cluster: str, installed: Install, tmp_path: Path) -> None:
    document = json.loads(hpcmoe(way, installed, tmp_path, "submit", f"cluster={cluster}", "--dry-run", "--json"))
    assert document["config"]["cluster"]["name"] == cluster
    assert document["script"].startswith("#!/bin/bash\n")


@pytest.mark.parametrize("way", WAYS)
def test_the_launcher_is_found(way: str, installed: Install, tmp_path: Path) -> None:
    document = json.loads(hpcmoe(way, installed, tmp_path, "submit", "-m", "train.seed=0,1", "--dry-run", "--json"))
    assert [run["config"]["train"]["seed"] for run in document["points"]] == [0, 1]


def test_the_wheel_puts_nothing_else_at_the_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hpcmoe", "hydra_plugins"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_holds_every_config_and_template(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "slurm_templates"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files
        assert {f"hpcmoe/{path.relative_to(ROOT)}" for path in files} <= names
