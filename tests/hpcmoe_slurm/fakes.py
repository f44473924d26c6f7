"""Stand-ins for Slurm's commands, for what a real Slurm does only on a bad day: each prints and returns what the test says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "recorded"


class FakeSlurm:
    """Commands in a folder of their own, alone on PATH. They note their arguments and their environment."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def answers(self, command: str, stdout: str = "", stderr: str = "", rc: int = 0, sleep_s: float = 0.0) -> None:
        """From now on ``command`` does this."""
        self.runs(command, f"printf %s {shlex.quote(stdout)}; printf %s {shlex.quote(stderr)} >&2; sleep {sleep_s}; exit {rc}")

    def runs(self, command: str, script: str) -> None:
        path = self.folder / command
        log = shlex.quote(str(self.folder / f"{command}.log"))
        env = shlex.quote(str(self.folder / f"{command}.env"))
        path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >>{log}\nenv >{env}\n{script}\n', encoding="utf-8")
        path.chmod(0o755)

    def calls(self, command: str) -> list[str]:
        path = self.folder / f"{command}.log"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def environment(self, command: str) -> dict[str, str]:
        lines = (self.folder / f"{command}.env").read_text(encoding="utf-8").splitlines()
        return dict(line.partition("=")[::2] for line in lines)
