"""The front door: help and version at once, the right verb for a wrong one, mistakes as one line and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpcmoe
from hpcmoe.cli import main as front
from hpcmoe.errors import UserError

HEAVY = {"torch", "hydra", "omegaconf", "rich", "numpy", "jinja2"}


def run(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcmoe", *arguments], capture_output=True, text=True, cwd=cwd, env={**os.environ, **environ}
    )


def imported(*arguments: str, cwd: Path) -> set[str]:
    """Top-level modules that are loaded when the command is done."""
    code = (
        "import contextlib, io, sys\nfrom hpcmoe.cli.main import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    main({list(arguments)!r})\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=True)
    return set(done.stdout.split())


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("submit", "status", "logs", "cancel", "resume", "wait"))


def test_no_verb_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main([]) == 2
    assert "usage: hpcmoe VERB" in capsys.readouterr().out


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hpcmoe {hpcmoe.__version__}\n"


@pytest.mark.parametrize(("wrong", "right"), [("sumbit", "submit"), ("stats", "status"), ("log", "logs"), ("cancle", "cancel")])
def test_an_unknown_verb_is_answered_with_the_nearest(wrong: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main([wrong]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"hpcmoe: no verb {wrong!r}; did you mean {right!r}? verbs: ")
    assert said.err.count("\n") == 1


def verb_that(raises: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(argv: list[str]) -> int:
        raise raises

    monkeypatch.setattr("hpcmoe.cli.status.main", main)


def test_a_users_mistake_is_one_line_and_with_json_a_document_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_that(UserError("two\nlines"), monkeypatch)
    assert front.main(["status"]) == 2
    assert capsys.readouterr() == ("", "hpcmoe: two lines\n")
    assert front.main(["status", "--json"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out) == {"error": "two lines"}
    assert said.err == "hpcmoe: two lines\n"


def test_an_interrupt_exits_as_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    verb_that(KeyboardInterrupt(), monkeypatch)
    assert front.main(["status"]) == 130


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    verb_that(ValueError("a bug"), monkeypatch)
    with pytest.raises(ValueError, match="a bug"):
        front.main(["status"])


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    shell = f"{sys.executable} -m hpcmoe submit --cfg job | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141")


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("nonsense",)])
def test_the_front_door_imports_nothing_heavy(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert imported(*arguments, cwd=tmp_path) & HEAVY == set()


def test_status_imports_neither_torch_nor_hydra(tmp_path: Path) -> None:
    assert imported("status", cwd=tmp_path) & {"torch", "hydra", "rich", "numpy"} == set()


def test_watch_imports_neither_torch_nor_hydra(tmp_path: Path) -> None:
    assert imported("watch", "--once", cwd=tmp_path) & {"torch", "hydra", "omegaconf", "numpy"} == set()


def test_doctor_imports_no_torch(tmp_path: Path) -> None:
    assert imported("doctor", "--no-such-option", cwd=tmp_path) & {"torch", "rich", "numpy"} == set()


def test_submit_never_imports_torch(tmp_path: Path) -> None:
    assert imported("submit", "--dry-run", cwd=tmp_path) & {"torch", "rich", "numpy", "submitit", "tensorboard"} == set()


def test_python_dash_m_is_the_same_command(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"hpcmoe {hpcmoe.__version__}\n")
