"""Who waits before whom: a pending job's place among all that could start in its partitions. Pure: hpcmoe.slurm.client asks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hpcmoe.slurm.parse import SEPARATOR, parse_job_id, parse_rows

WAITING_COLUMNS = ("%i", "%P", "%Q", "%r", "%u")
WAITING_FORMAT = SEPARATOR.join(WAITING_COLUMNS)
# Jobs that nothing in the queue holds back but something of their own; they are before nobody.
HELD_BACK = (
    "Dependency",
    "DependencyNeverSatisfied",
    "BeginTime",
    "JobArrayTaskLimit",
    "PartitionTimeLimit",
    "PartitionNodeLimit",
)


@dataclass(frozen=True)
class QueuePlace:
    """A place counted from 1; the scheduler may still start a lower place earlier (backfill). An array is one job in it."""

    place: int
    of: int
    only_own: bool  # nobody else's jobs were to be seen: the site may hide them (PrivateData=jobs)


def places_among(text: str, job_ids: Collection[str]) -> dict[str, QueuePlace]:
    """Places of ``job_ids`` from rows of ``squeue -h -t PENDING -o WAITING_FORMAT``; a job that is held back has none."""
    waiting: list[tuple[set[str], int, str]] = []  # partitions, priority, user
    wanted: dict[str, tuple[set[str], int, str]] = {}
    for ids, partitions, priority, reason, user in parse_rows(text, len(WAITING_COLUMNS)):
        if reason in HELD_BACK or "Held" in reason:
            continue
        row = (set(partitions.split(",")), int(priority) if priority.isdigit() else 0, user)
        waiting.append(row)
        wanted |= {job_id: row for job_id in parse_job_id(ids).each() if job_id in job_ids}
    found: dict[str, QueuePlace] = {}
    for job_id, (partitions_of, priority_of, user_of) in wanted.items():
        rivals = [row for row in waiting if row[0] & partitions_of]
        before = sum(row[1] > priority_of for row in rivals)
        found[job_id] = QueuePlace(before + 1, len(rivals), all(row[2] == user_of for row in rivals))
    return found
