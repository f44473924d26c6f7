"""Handing a job script to sbatch, once: when the answer is lost on the way, the job is looked for before it is sent again.

Each submission carries a token in the job's comment. Not for what the script says: that is hpcmoe.runs.jobspec.
"""

from __future__ import annotations

import getpass
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError, SlurmRejected, SlurmUnreachable, run_or_reject, scrubbed
from hpcmoe.slurm.directives import check_carries, read_directives
from hpcmoe.slurm.facts import QueueRow
from hpcmoe.slurm.parse import format_timestamp, parse_submitted

# sbatch itself tries 15 times, a few seconds apart, when the controller asks it to.
SBATCH_TIMEOUT_S = 180.0
TRIES = 3
RETRY_AFTER_S = 5.0
# The controller may still be working on a request whose answer was lost, for as long as sbatch waited for it (MessageTimeout).
LOOK_AGAIN_AFTER_S = 10.0
LOOK_EVERY_S = 1.0
LOOK_FOR_S = 300.0


def token_mark(token: str) -> str:
    """How the token stands in a job's comment."""
    return f"hpcmoe:{token}"


def comment_with(token: str, own: str | None) -> str:
    """The job's comment: the user's own, then the token."""
    return f"{own} {token_mark(token)}" if own else token_mark(token)


def begin_flag(not_before: float | None) -> list[str]:
    """sbatch's flag for a start no earlier than this (epoch s); none for a time that has passed."""
    return [f"--begin={format_timestamp(not_before)}"] if not_before is not None and not_before > time.time() else []


def sbatch(script: Path, extra_args: Sequence[str] = (), token: str = "") -> str:
    """Submit ``script`` and return the job's id. ``extra_args`` win over the script's #SBATCH lines.

    ``token``: unique to this one submission. Raises SlurmRejected with Slurm's reason, or SlurmUnreachable when it is sure that
    nothing was submitted, or when Slurm has stayed silent for so long that nobody can tell.
    """
    command = ["sbatch", "--parsable", *extra_args]
    if token:
        check_carries("token", token)
        command.append(f"--comment={comment_with(token, read_directives(script.read_text(encoding='utf-8')).get('comment'))}")
    for attempt in range(TRIES):
        try:
            # No LC_ALL here: sbatch hands its environment on to the job.
            return parse_submitted(run_or_reject([*command, str(script)], SBATCH_TIMEOUT_S, scrubbed(os.environ)))
        except SlurmUnreachable as silence:
            if silence.maybe_done and token:
                ghost = find_submitted(token)
                if ghost is not None:
                    return ghost
            elif silence.maybe_done or attempt == TRIES - 1:
                raise
        except ValueError as error:
            if isinstance(error, SlurmError):
                raise
            raise SlurmRejected(str(error)) from error
        time.sleep(RETRY_AFTER_S)
    raise SlurmUnreachable(f"sbatch got no answer in {TRIES} tries, and no job of this submission exists")


def find_submitted(token: str) -> str | None:
    """The id of the job that carries ``token``; None when the controller has said twice, some time apart, that there is none.

    Raises SlurmUnreachable when it does not say so within LOOK_FOR_S.
    """
    deadline = time.monotonic() + LOOK_FOR_S
    first_no: float | None = None
    while True:
        try:
            found = job_with_token(token, client.queue_of_user(getpass.getuser()))
        except SlurmUnreachable:
            if time.monotonic() > deadline:
                raise
        else:
            if found is not None:
                return found
            first_no = time.monotonic() if first_no is None else first_no
            if time.monotonic() - first_no >= LOOK_AGAIN_AFTER_S:
                return None
        time.sleep(LOOK_EVERY_S)


def find_anywhere(token: str, since: float) -> str | None:
    """The id of the job that carries ``token``, for whoever did not submit it; None when queue and accounting have both said
    twice, MessageTimeout apart, that there is none. ``since``: it was not submitted before (epoch s).

    Raises SlurmError when one of them does not say so.
    """
    pause = max(LOOK_AGAIN_AFTER_S, client.cluster_facts().message_timeout_s)
    for wait in (pause, 0.0):
        found = job_with_token(token, client.queue_of_user(getpass.getuser())) or find_accounted(token, since)
        if found is not None:
            return found
        time.sleep(wait)
    return None


def find_accounted(token: str, since: float) -> str | None:
    """The id of the job that carries ``token`` by accounting, which forgets nothing for days. Raises SlurmError."""
    lines = client.submit_lines(getpass.getuser(), since - client.LAG_S)
    mark = re.compile(rf"(?<![\w-]){re.escape(token_mark(token))}(?![\w-])")
    return next((job_id.partition("_")[0] for job_id, line in lines if mark.search(line)), None)


def job_with_token(token: str, rows: dict[str, QueueRow]) -> str | None:
    """The job among ``rows`` whose comment holds the token; an array's tasks count as their array. Pure."""
    for row in rows.values():
        if token_mark(token) in row.comment.split():
            return row.job_id.partition("_")[0]
    return None
