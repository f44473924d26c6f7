"""How many jobs a user may still submit, by Slurm's limits on submitted jobs. Each element of an array counts as a job.

Where accounting does not answer, nothing is known, and sbatch's refusal says it (``no_room``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpcmoe.slurm.command import SlurmError, SlurmRejected, run_or_reject
from hpcmoe.slurm.parse import SEPARATOR, parse_job_id, parse_records, parse_rows
from hpcmoe.slurm.states import base_state, is_alive

MINE_COLUMNS = ("%i", "%T", "%a", "%q", "%k")
ASSOC_COLUMNS = ("Account", "Partition", "DefaultQOS", "MaxSubmitJobs", "GrpSubmitJobs")
QOS_COLUMNS = ("Name", "MaxSubmitJobsPerUser", "MaxSubmitJobsPerAccount", "GrpSubmitJobs")

# sbatch's refusals that other jobs' ends will lift (slurmctld's job_submit limits, acct_policy.c), and its words for all of them.
_NO_ROOM = re.compile(r"(Assoc|QOS)\w*Submit\w*Limit", re.IGNORECASE)
_PERHAPS = "Job violates accounting/QOS policy"


@dataclass(frozen=True)
class MyJob:
    """A job of the user that has not ended."""

    job_id: str  # of an array's element: 123_4
    state: str
    account: str = ""
    qos: str = ""
    comment: str = ""

    @property
    def job(self) -> str:
        """The job or the whole array."""
        return self.job_id.partition("_")[0]


def read_mine(text: str) -> list[MyJob]:
    """Rows of ``squeue -h -r`` with MINE_COLUMNS; those that have ended are left out."""
    found = []
    for ids, state, account, qos, comment in parse_rows(text, len(MINE_COLUMNS)):
        if is_alive(base_state(state)):
            words = "" if comment == "(null)" else comment
            found += [MyJob(job_id, base_state(state), account, qos, words) for job_id in parse_job_id(ids).each()]
    return found


def my_jobs(user: str) -> list[MyJob]:
    """Every job of ``user`` that has not ended. Raises SlurmError."""
    form = f"--format={SEPARATOR.join(MINE_COLUMNS)}"
    return read_mine(run_or_reject(["squeue", "--noheader", "--array", "--states=all", f"--user={user}", form]))


@dataclass(frozen=True)
class SubmitLimit:
    """At most ``most`` jobs at once of those with this account or QOS (None: any)."""

    most: int
    name: str  # in Slurm's words
    account: str | None = None
    qos: str | None = None

    def left(self, jobs: Iterable[MyJob]) -> int:
        """How many more there may be beside these."""
        used = sum(self.account in (None, job.account) and self.qos in (None, job.qos) for job in jobs)
        return max(0, self.most - used)


def read_limits(
    assoc: str, qos: str, account: str | None, qos_names: Sequence[str | None], partition: str | None = None
) -> list[SubmitLimit]:
    """The limits for a job of ``account``, these QOS and ``partition``; None: the default one, which only Slurm knows.

    Which of several accounts is the default one is not told, so that none of their limits counts. ``assoc``, ``qos``: what
    ``sacctmgr -n -P show`` prints with ASSOC_COLUMNS and QOS_COLUMNS.
    """
    rows = [line.split("|") for line in assoc.splitlines()]
    fitting = [row for row in rows if len(row) == len(ASSOC_COLUMNS) and account in (None, row[0])]
    mine = [row for row in fitting if row[1] in ("", partition)]
    if len({row[0] for row in mine}) > 1:
        mine = []
    names = {name or row[2] for name in qos_names for row in mine} | {name for name in qos_names if name}
    found = [
        SubmitLimit(int(row[column]), f"{ASSOC_COLUMNS[column]} of account {row[0]}", account=row[0])
        for row in mine
        for column in (3, 4)
        if row[column].isdigit()
    ]
    for row in (line.split("|") for line in qos.splitlines()):
        if len(row) == len(QOS_COLUMNS) and row[0] in names:
            found += [
                SubmitLimit(int(row[column]), f"{QOS_COLUMNS[column]} of QOS {row[0]}", qos=row[0])
                for column in (1, 2, 3)
                if row[column].isdigit()
            ]
    return found


def submit_limits(user: str, account: str | None, qos: str | None, partition: str | None) -> list[SubmitLimit]:
    """The limits on the user's submitted jobs that accounting tells; none where it does not answer."""
    listing = ("sacctmgr", "--noheader", "--parsable2", "show")
    try:
        assoc = run_or_reject([*listing, "assoc", f"user={user}", f"format={','.join(ASSOC_COLUMNS)}"])
        known = run_or_reject([*listing, "qos", f"format={','.join(QOS_COLUMNS)}"])
    except SlurmError:
        return []
    return read_limits(assoc, known, account, [qos, *_of_partition(partition)], partition)


def _of_partition(partition: str | None) -> list[str]:
    """The QOS whose limits hold for all of the partition's jobs."""
    try:
        text = run_or_reject(["scontrol", "show", "partition", partition]) if partition else ""
    except SlurmError:
        return []
    names = [record.get("QoS", "N/A") for record in parse_records(text)]
    return [name for name in names if name not in ("N/A", "", "(null)")]


def no_room(refusal: SlurmRejected, others: Callable[[], int]) -> bool:
    """The job was refused because the user has as many as they may have. ``others``: how many jobs the user has in the queue.

    Slurm has one text for all limits of accounting; where it does not name the limit, there is no room if there are other jobs
    whose ends would make some.
    """
    if _NO_ROOM.search(refusal.said):
        return True
    return _PERHAPS in refusal.said and not re.search(r"(Assoc|QOS)\w+Limit", refusal.said) and others() > 0
