"""Questions to Slurm and requests to it, one function each. Text formats only: Slurm's JSON changes with every version.

Raises SlurmUnreachable when Slurm did not answer, which is never the same as an empty answer. Submissions: hpcmoe.slurm.submit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from hpcmoe.slurm.command import SlurmRejected, reason_line, run, run_or_reject
from hpcmoe.slurm.facts import (
    ACCT_COLUMNS,
    QUEUE_FORMAT,
    AcctRow,
    ClusterFacts,
    JobFacts,
    PartitionFacts,
    QueueRow,
    read_accounting,
    read_cluster,
    read_jobs,
    read_partition,
    read_queue,
)
from hpcmoe.slurm.parse import SEPARATOR, format_timestamp

# A requeued job whose processes are still going would lose an earlier StartTime: Slurm writes its own hold when they are gone,
# unless the StartTime is still to come by then.
HOLD_WHILE_COMPLETING_S = 20

_SQUEUE = ("squeue", "--noheader", "--array", "--states=all", f"--format={QUEUE_FORMAT}")
_SACCT = (
    *("sacct", "--duplicates", "--allocations", "--noheader", "--parsable2"),
    *(f"--delimiter={SEPARATOR}", f"--format={','.join(ACCT_COLUMNS)}"),
)

__all__ = [
    "AcctRow",
    "ClusterFacts",
    "JobFacts",
    "PartitionFacts",
    "QueueRow",
    "cancel",
    "cluster_facts",
    "partition_facts",
    "queue_of_user",
    "requeue",
    "sacct",
    "show_job",
    "squeue",
    "start_now",
]


def squeue(job_ids: Iterable[str]) -> dict[str, QueueRow]:
    """What the controller knows of these jobs, by id; ended ones too, until it forgets them. One call for any number of ids.

    An array's id brings every task of it. A job that is not in the answer is not known to the controller.
    """
    ids = sorted(set(job_ids))
    if not ids:
        return {}
    done = run([*_SQUEUE, f"--jobs={','.join(ids)}"])
    if done.rc != 0 and not _forgotten(done.stderr):
        raise SlurmRejected(reason_line(done.stderr))
    return read_queue(done.stdout)


def _forgotten(stderr: str) -> bool:
    """squeue and scontrol answer like this, with rc 1, for a job that ended more than MinJobAge ago."""
    return "Invalid job id" in stderr


def queue_of_user(user: str) -> dict[str, QueueRow]:
    """Every job of ``user`` that the controller knows."""
    return read_queue(run_or_reject([*_SQUEUE, f"--user={user}"]))


def sacct(job_ids: Sequence[str], since: float, name: str | None = None) -> list[AcctRow]:
    """Accounting records of every start of these jobs, oldest first.

    ``since``: records submitted earlier (epoch s) belong to an older job with the same id; ``name``: likewise for another name.
    """
    if not job_ids:
        return []
    out = run_or_reject([*_SACCT, f"--jobs={','.join(sorted(set(job_ids)))}", f"--starttime={format_timestamp(since)}"])
    return [row for row in read_accounting(out) if (row.submit or 0.0) >= since and name in (None, row.name)]


def show_job(job_id: str) -> JobFacts | None:
    """The controller's record of one job; None when it has forgotten it (MinJobAge after its end) or never knew it."""
    done = run(["scontrol", "show", "job", job_id])
    if done.rc != 0:
        if _forgotten(done.stderr + done.stdout):
            return None
        raise SlurmRejected(reason_line(done.stderr or done.stdout))
    records = read_jobs(done.stdout)
    return next((record for record in records if record.job_id == job_id), records[0] if records else None)


def requeue(job_id: str) -> None:
    """Ask Slurm to bring the job back after this start of it. A cancelled job stays cancelled. Raises SlurmRejected.

    ``Incomplete``: without it Slurm requeues even a job that its user has just cancelled, and says nothing about it.
    """
    run_or_reject(["scontrol", "requeue", "Incomplete", job_id])


def start_now(job_id: str) -> bool:
    """Lift the hold after a requeue (121 s by default). True when Slurm took it; the owner may do this.

    While the job's processes are still going, the new start is set HOLD_WHILE_COMPLETING_S ahead; see there.
    """
    facts = show_job(job_id)
    if facts is None:
        return False
    start = "now" if facts.state == "PENDING" else format_timestamp(time.time() + HOLD_WHILE_COMPLETING_S)
    return run(["scontrol", "update", f"JobId={job_id}", f"StartTime={start}"]).rc == 0


def cancel(job_ids: Sequence[str]) -> None:
    """End these jobs for good. Ended and forgotten ones are no error."""
    if job_ids:
        run_or_reject(["scancel", *job_ids])


def cluster_facts() -> ClusterFacts:
    """How this site's Slurm is set up."""
    return read_cluster(run_or_reject(["scontrol", "show", "config"]))


def partition_facts(name: str) -> PartitionFacts:
    """A partition's rules. Raises SlurmRejected when there is no such partition."""
    facts = read_partition(run_or_reject(["scontrol", "show", "partition", name]))
    if facts is None:
        raise SlurmRejected(f"no partition {name!r}")
    return facts
