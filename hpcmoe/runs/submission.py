"""Submitting a run's next job once, whoever does it: a lock in the run directory, and the intent in the journal before the job.

An intent whose outcome nobody wrote (its writer died between sbatch and the journal) keeps its token, and the next one to submit
looks for the job first. The journal alone decides where file locks do not reach over the file system.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from typing import Any

from hpcmoe.locks import file_lock
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.life import JobView, Life, fold
from hpcmoe.runs.lifecycle import ORPHAN_S, SUBMISSION_S
from hpcmoe.runs.place import process_start_ticks
from hpcmoe.runs.rundir import RunDir
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.states import is_ended
from hpcmoe.slurm.submit import find_anywhere

# The writers of what this process is submitting now, by thread. An intent of its own that is not among them came to nothing, for
# example on a full disk, and must not keep the process that lives on from trying again.
_UNDER_WAY: dict[int, str] = {}


def submission_lock(run: RunDir, wait_s: float = 0.0) -> contextlib.AbstractContextManager[bool]:
    """Held around looking at a run, deciding to submit it, and submitting it."""
    return file_lock(run.path / ".submission.lock", wait_s)


def new_writer() -> str:
    """Names this process, for good, and one thing that its thread is submitting from now on."""
    writer = f"{os.uname().nodename}:{os.getpid()}:{process_start_ticks(os.getpid())}:{secrets.token_hex(3)}"
    _UNDER_WAY[threading.get_ident()] = writer
    return writer


def begin(run: RunDir, token: str, how: str, attempt: str | None = None, **more: Any) -> bool:
    """Journal that this process is about to submit the run; False when another one's intent came first.

    ``more``: instead_of=WRITER, of an intent found to be an orphan.
    """
    writer = new_writer()
    Journal(run.journal, attempt).append("submitting", token=token, how=how, writer=writer, **more)
    intent = fold(read_journal(run.journal)).intent
    return intent is not None and intent["writer"] == writer


def begin_element(run: RunDir, token: str, how: str, writer: str, task: int | None) -> bool:
    """The same for one of the runs that ``writer`` is about to submit together; ``task``: its place in their array.

    False, too, when the run is over, or has a job. What makes all of them durable is the sweep's own intent.
    """
    Journal(run.journal).append_unsynced("submitting", token=token, how=how, writer=writer, task=task)
    life = fold(read_journal(run.journal))
    return life.intent is not None and life.intent["writer"] == writer and life.job_id is None and life.ended is None


def over() -> None:
    """What this thread began to submit last is done with, or has failed."""
    _UNDER_WAY.pop(threading.get_ident(), None)


def writer_gone(life: Life, job: JobView) -> bool:
    """Whether whoever began the submission in the journal is gone, or done with it. ``job``: the one that carries the run."""
    if life.intent is None:
        return False
    if life.intent.get("abandoned"):
        return True
    if life.intent.get("attempt") is not None:  # it was the job itself, which submitted its successor
        return job.state is not None and is_ended(job.state)
    return process_gone(str(life.intent.get("writer", "::")))


def process_gone(writer: str) -> bool:
    """The process of this name is known to be gone, or to be done with what it began. Of another host's nothing is known."""
    host, pid, ticks = writer.split(":")[:3]
    if host != os.uname().nodename:
        return False  # see ``elsewhere``
    if str(process_start_ticks(int(pid))) != ticks:
        return True
    return int(pid) == os.getpid() and writer not in _UNDER_WAY.values()


def elsewhere(life: Life) -> bool:
    """Whether it was another host, of whose processes nobody here can say that they live."""
    writer = "" if life.intent is None or life.intent.get("attempt") is not None else str(life.intent.get("writer", ""))
    return writer.count(":") >= 2 and writer.split(":")[0] != os.uname().nodename


def being_submitted(life: Life, job: JobView, now: float) -> bool:
    """Somebody, who may be alive, is submitting the run in this moment."""
    if life.intent is None or now - life.intent["t"] >= SUBMISSION_S or writer_gone(life, job):
        return False
    if not elsewhere(life) or now - life.intent["t"] < ORPHAN_S:
        return True
    return not looked_for(life)


def looked_for(life: Life) -> bool:
    """Have Slurm's queue and accounting say what they know of the job that was begun last. False: they do not say.

    What they say is read again by whoever submits (hpcmoe.runs.create).
    """
    assert life.intent is not None
    try:
        find_anywhere(str(life.intent["token"]), float(life.intent["t"]))
    except SlurmError:
        return False
    return True
