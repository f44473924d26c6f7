"""The only place that runs Slurm's commands: time limit, plain C locale, an environment without a surrounding job's variables.

Not for what the output means: that is hpcmoe.slurm.parse and client.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcmoe.errors import UserError

DEFAULT_TIMEOUT_S = 60.0


class SlurmError(UserError):
    """Slurm did not do what was asked; the message is one line."""


class SlurmMissing(SlurmError):  # noqa: N818
    """There is no Slurm on this machine."""


class SlurmUnreachable(SlurmError):  # noqa: N818
    """Slurm did not answer, so nothing is known: neither that a thing exists nor that it does not."""

    def __init__(self, message: str, maybe_done: bool = False) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done  # the request may have been carried out, only its answer was lost


class SlurmRejected(SlurmError):  # noqa: N818
    """Slurm answered, and the answer is no. ``line`` is Slurm's own reason, ``said`` all that it said."""

    def __init__(self, line: str, said: str | None = None) -> None:
        super().__init__(line)
        self.line = line
        self.said = line if said is None else said


@dataclass(frozen=True)
class Completed:
    """What a command printed and returned."""

    stdout: str
    stderr: str
    rc: int


# Variables of a surrounding job, MPI launcher or torchrun. sbatch would hand them on, and srun and torch would obey them.
_LEAKING_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMIX_", "PMI_", "OMPI_", "TORCHELASTIC_", "SUBMITIT_")
_LEAKING_NAMES = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"}
    | {"HPCMOE_RUN_DIR", "HPCMOE_ATTEMPT"}
)
# Without these the commands do not find their cluster at all.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})

# Slurm's answer was lost on the way: the request itself may have arrived.
_ANSWER_LOST = ("Socket timed out", "Zero Bytes were transmitted", "Unexpected message received", "Connection reset")
_NO_CONTACT = (
    "Unable to contact slurm controller",
    "Unable to contact Slurm controller",
    "Connection refused",
    "Connection timed out",
    "Communication connection failure",
    "Problem talking to the database",
    "Unable to establish connection",
    "Unable to establish control",
    "Unable to connect to database",
    "Sending PersistInit",
    "standby mode",
    "Resource temporarily unavailable",
    "temporarily unable to accept job",
    "Could not establish a configuration source",
    "authentication error",
    "Munge encode failed",
    "If munged is up",
    "No route to host",
    "Transport endpoint",
)


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what a surrounding job or launcher has put there. HOME, PATH, virtual environments stay."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or (name not in _LEAKING_NAMES and not name.startswith(_LEAKING_PREFIXES))
    }


def command_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands get: scrubbed, messages in English, times as epoch seconds, array lists uncut."""
    return scrubbed(environ) | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


def run(argv: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S, env: Mapping[str, str] | None = None) -> Completed:
    """Run one of Slurm's commands. Any exit code of an answer is returned; no answer raises.

    Raises SlurmMissing where the command does not exist, SlurmUnreachable where Slurm did not answer.
    """
    environment = command_environment(os.environ) if env is None else dict(env)
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal must not lose the answer of a submission
        )
    except FileNotFoundError as error:
        raise SlurmMissing(f"no {argv[0]!r} on this machine: this is not a Slurm cluster, or Slurm is not on PATH") from error
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        _end(process)
        raise SlurmUnreachable(f"{argv[0]} did not answer within {timeout_s:.0f} s", maybe_done=True) from error
    except BaseException:
        _end(process)
        raise
    done = Completed(out.decode("utf-8", errors="replace"), err.decode("utf-8", errors="replace"), process.returncode)
    if done.rc != 0:
        raise_if_unreachable(argv[0], done)
    return done


def _end(process: subprocess.Popen[bytes]) -> None:
    """A command that has just ended is no trouble: an error here would take the place of a Ctrl-C, and be handled as Slurm's."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def raise_if_unreachable(command: str, done: Completed) -> None:
    """Tell silence from a no. Only called for a non-zero exit code."""
    line = reason_line(done.stderr)
    if any(mark in done.stderr for mark in _ANSWER_LOST):
        raise SlurmUnreachable(f"{command}: {line}", maybe_done=True)
    if any(mark in done.stderr for mark in _NO_CONTACT):
        raise SlurmUnreachable(f"{command}: {line}")


def reason_line(stderr: str) -> str:
    """Slurm's reason in one line: its last error line, else its last line, without ``sbatch: error:`` in front."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "fatal:" in line]
    line = (errors or lines or ["no reason given"])[-1]
    for mark in ("error: ", "fatal: "):
        line = line.rpartition(mark)[2]
    return line


def run_or_reject(argv: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S, env: Mapping[str, str] | None = None) -> str:
    """Like ``run``, but a non-zero exit code raises SlurmRejected. Returns stdout."""
    done = run(argv, timeout_s, env)
    if done.rc != 0:
        raise SlurmRejected(reason_line(done.stderr or done.stdout), done.stderr or done.stdout)
    return done.stdout
