"""Job specs for tests, and a stand-in for Python that plays arrive, the ranks and depart as small shell snippets."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.runs.jobspec import JobSpec

PATIENCE_S = 180.0  # for what takes a second on a machine that has nothing else to do

# Everything that a shell or sbatch could trip over, except what the executor must refuse (newline, backslash).
NASTY = 'it\'s a "test" of $HOME & `date` %j * ü'


def config(*overrides: str) -> Config:
    return load(list(overrides))


def spec(config: Config, *run_dirs: Path, **fields: object) -> JobSpec:
    base = JobSpec(run_dirs, config, "/opt/hpcmoe/bin/python", "hpcmoe-abc123", "abc123-0")
    return replace(base, **fields)  # type: ignore[arg-type]


STUB = """#!/bin/bash
# Plays `python [-u] -m MODULE ...`: sources what the test put into the run directory for that module.
while [[ $1 == -* ]]; do [[ $1 == -m ]] && module=$2 && shift; shift; done
arguments=("$@")
say() { printf '%s\\n' "$*" >>"$HPCMOE_RUN_DIR/calls"; }
case $module in
  hpcmoe.slurm.port) echo 23456 ;;
  hpcmoe.runs.arrive)
    mkdir -p "$HPCMOE_RUN_DIR/attempts/$HPCMOE_ATTEMPT"
    say "arrive $HPCMOE_ATTEMPT"
    [[ $1 == "$HPCMOE_RUN_DIR" ]] || exit 90
    [[ -e $HPCMOE_RUN_DIR/arrive.sh ]] && source "$HPCMOE_RUN_DIR/arrive.sh"
    exit 0 ;;
  hpcmoe.engine)
    [[ $1 == "$HPCMOE_RUN_DIR" ]] || exit 91
    source "$HPCMOE_RUN_DIR/rank.sh" ;;
  hpcmoe.runs.depart)
    say "depart ${*:2}"
    [[ $1 == "$HPCMOE_RUN_DIR" ]] || exit 92
    [[ -e $HPCMOE_RUN_DIR/depart.sh ]] && source "$HPCMOE_RUN_DIR/depart.sh"
    exit 0 ;;
  *) exit 93 ;;
esac
"""


class Stage:
    """A run directory with a nasty name, in which the parts of a job script are played."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / NASTY
        (self.run_dir / "sbatch").mkdir(parents=True)
        self.python = folder / "py thon's"
        self.python.write_text(STUB, encoding="utf-8")
        self.python.chmod(0o755)
        self.play(rank="exit 0")

    def play(self, **parts: str) -> None:
        """``rank=``, ``arrive=``, ``depart=``: what each of them does, in bash."""
        for name, text in parts.items():
            (self.run_dir / f"{name}.sh").write_text(text + "\n", encoding="utf-8")

    @property
    def calls(self) -> list[str]:
        path = self.run_dir / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def start(self, script: str, **env: str) -> subprocess.Popen[str]:
        path = self.run_dir / "sbatch" / "attempt.sh"
        path.write_text(script, encoding="utf-8")
        return subprocess.Popen(
            ["bash", str(path)],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # as the executor starts it: a shell cannot trap what was ignored when it started (nohup, a shell's background job)
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )

    def run(self, script: str, timeout_s: float = PATIENCE_S, **env: str) -> int:
        process = self.start(script, **env)
        output, _ = process.communicate(timeout=timeout_s)
        strange = [line for line in output.splitlines() if not line.startswith("hpcmoe: ") and " Killed " not in line]
        assert not strange, output
        return process.returncode
