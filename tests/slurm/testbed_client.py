"""The running testbed as a test sees it: run a command as some user, ask for a job's state, wait for it.

Not for starting or stopping it: the `testbed` fixture in conftest.py does that.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm import testbed_cluster
from tests.slurm.testbed_processes import SBIN_PATH

TEST_USER = "hpcmoe-test"


@dataclass(frozen=True)
class Testbed:
    """A testbed that is up in `root`."""

    root: Path

    __test__ = False  # the name starts with Test, but pytest need not look

    @property
    def env(self) -> dict[str, str]:
        """This process's environment, less what a surrounding Slurm job left in it, plus SLURM_CONF."""
        kept = {name: value for name, value in os.environ.items() if not re.match("SLURM|SBATCH|SRUN|SALLOC", name)}
        path = f"{kept.get('PATH', '')}:{SBIN_PATH}"
        return kept | {"PATH": path, "SLURM_CONF": str(self.root / "slurm.conf")}

    def run(
        self, argv: Sequence[str], user: str | None = None, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as `user` (None: as this process), with `env` added; `options` are subprocess.run's.

        An ordinary user starts at home, unless `cwd` says otherwise. Output is captured as text; 120 s is the default timeout.
        """
        environment, identity = self._person(user, env)
        options = identity | {"capture_output": True, "text": True, "timeout": 120} | options
        done: subprocess.CompletedProcess[str] = subprocess.run(list(argv), env=environment, **options)
        return done

    def start(
        self, argv: Sequence[str], user: str | None, log: Path, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Like `run`, but does not wait: what it says goes to the end of `log`."""
        environment, identity = self._person(user, env)
        with log.open("ab") as out:
            return subprocess.Popen(list(argv), env=environment, stdout=out, stderr=out, **(identity | options))

    def _person(self, user: str | None, env: Mapping[str, str] | None) -> tuple[dict[str, str], dict[str, Any]]:
        """Environment and subprocess options of a command of this user's."""
        if user is None:
            return {**self.env, **(env or {})}, {}
        person = pwd.getpwnam(user)
        who = {"HOME": person.pw_dir, "USER": user, "LOGNAME": user}
        groups = os.getgrouplist(user, person.pw_gid)
        options = {"user": user, "group": person.pw_gid, "extra_groups": groups, "cwd": person.pw_dir}
        return {**self.env, **who, **(env or {})}, options

    def sbatch(self, script: str, *options: str, user: str | None = None, cwd: str | None = None) -> str:
        """Submit the text of a script; returns the job id."""
        place: dict[str, Any] = {} if cwd is None else {"cwd": cwd}
        done = self.run(["sbatch", "--parsable", *options], user, input=script, check=False, **place)
        if done.returncode:
            raise AssertionError(f"sbatch {' '.join(options)} -> {done.returncode}: {done.stderr}")
        return done.stdout.strip().partition(";")[0]

    def show(self, job_id: str) -> dict[str, str]:
        """`scontrol show job -o` as a dict (of the first record, if an array has several); empty for an unknown job."""
        lines = self.run(["scontrol", "show", "job", "-o", job_id]).stdout.splitlines()
        return dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=|$)", lines[0])) if lines else {}

    def state(self, job_id: str) -> str:
        """Slurm's word for the job's state; "" when slurmctld does not know the job."""
        return self.show(job_id).get("JobState", "")

    def wait_for(self, job_id: str, states: Iterable[str], timeout: float = 180) -> str:
        """The first of `states` that the job is seen in; AssertionError with Slurm's record of it after `timeout` s."""
        wanted = set(states)
        deadline = time.monotonic() + timeout
        while (state := self.state(job_id)) not in wanted:
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job_id} is {state}, not {wanted}, after {timeout} s: {self.show(job_id)}")
            time.sleep(0.2)
        return state

    def set_user_signal(self, on: bool) -> None:
        """Whether preemption sends a job the signal of its own --signal, from now on."""
        testbed_cluster.set_user_signal(self.root, on)

    def shared_folder(self, name: str) -> Path:
        """A new folder under the testbed's where every user may write."""
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
        parent = self.root / "shared"
        parent.mkdir(exist_ok=True)
        number = sum(1 for entry in parent.iterdir() if entry.name.startswith(stem))
        folder = parent / (f"{stem}.{number}" if number else stem)
        folder.mkdir()
        folder.chmod(0o1777)
        return folder
