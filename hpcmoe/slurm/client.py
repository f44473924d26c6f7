"""Questions to Slurm and requests to it, one function each. Text formats only: Slurm's JSON changes with every version.

Raises SlurmUnreachable when Slurm did not answer, which is never the same as an empty answer. Submissions: hpcmoe.slurm.submit.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from hpcmoe.slurm.command import SlurmError, SlurmRejected, reason_line, run, run_or_reject
from hpcmoe.slurm.facts import (
    ACCT_COLUMNS,
    QUEUE_FORMAT,
    AcctRow,
    ClusterFacts,
    JobFacts,
    QueueRow,
    read_accounting,
    read_cluster,
    read_down,
    read_jobs,
    read_queue,
)
from hpcmoe.slurm.parse import SEPARATOR, format_duration, format_timestamp, parse_rows
from hpcmoe.slurm.places import WAITING_FORMAT, QueuePlace, places_among

# When the processes of a requeued job are gone, Slurm sets StartTime to cred_expire + 1 s ahead, unless it is in the future
# already (job_mgr.c, batch_requeue_fini). So this must outlast what the job still has to do, and no more.
HOLD_WHILE_COMPLETING_S = 10.0
# Of a job that has left, slurmd remembers its revoked credential by the second: started in that very second, the job is killed as
# "already killed, do not launch batch job" and ends as FAILED (seen on 22.05 in 3 of 8 starts with StartTime=now).
HOLD_WHEN_PENDING_S = 5.0
# A job's submit time in accounting may be this much older than in the controller, which writes it anew at a requeue.
LAG_S = 5.0
# Accounting hears of an end within half a second when it is well; a leaving job has little time to wait for it.
ACCOUNTING_TRIES, ACCOUNTING_EVERY_S = 4, 0.5
# Ends of one start of a job that nobody chose: a requeue may follow.
COMES_BACK = frozenset({"PREEMPTED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"})

# More ids than this are not written on squeue's command line: it reads all jobs then anyway, and the kernel takes 128 KiB of one
# argument.
MOST_IDS = 500

_SQUEUE = ("squeue", "--noheader", "--array", "--states=all", f"--format={QUEUE_FORMAT}")
_SACCT = (
    *("sacct", "--duplicates", "--allocations", "--noheader", "--parsable2"),
    *(f"--delimiter={SEPARATOR}", f"--format={','.join(ACCT_COLUMNS)}"),
)

__all__ = [
    "AcctRow",
    "ClusterFacts",
    "JobFacts",
    "QueuePlace",
    "QueueRow",
    "cancel",
    "cluster_facts",
    "down_nodes",
    "end_within",
    "exclude_nodes",
    "hold",
    "limit_array",
    "places",
    "queue_of_user",
    "release",
    "requeue",
    "sacct",
    "show_ending",
    "show_job",
    "squeue",
    "start_soon",
    "submit_lines",
]


def squeue(job_ids: Iterable[str], *users: str) -> dict[str, QueueRow]:
    """What the controller knows of these jobs, by id; ended ones too, until it forgets them. One call for any number of ids.

    An array's id brings every task of it. A job that is not in the answer is not known to the controller. ``users``: names or
    uids whose jobs they are. Of more jobs than MOST_IDS the answer has all jobs of these users; without users, everyone's.
    """
    ids = sorted(set(job_ids))
    if not ids:
        return {}
    if len(ids) > MOST_IDS:
        ids = _arrays(ids)
    everyone = [f"--user={','.join(sorted(users))}"] if users else []
    done = run([*_SQUEUE, *([f"--jobs={','.join(ids)}"] if len(ids) <= MOST_IDS else everyone)])
    if done.rc != 0 and not _forgotten(done.stderr):
        raise SlurmRejected(reason_line(done.stderr))
    return read_queue(done.stdout)


def _arrays(ids: Iterable[str]) -> list[str]:
    """The jobs and arrays behind these ids: a sweep's runs are the tasks of one array."""
    return sorted({job_id.partition("_")[0] for job_id in ids})


def _forgotten(stderr: str) -> bool:
    """squeue and scontrol answer like this, with rc 1, for a job that ended more than MinJobAge ago."""
    return "Invalid job id" in stderr


def queue_of_user(user: str) -> dict[str, QueueRow]:
    """Every job of ``user`` that the controller knows."""
    return read_queue(run_or_reject([*_SQUEUE, f"--user={user}"]))


def places(job_ids: Collection[str]) -> dict[str, QueuePlace]:
    """Where these pending jobs stand among all that wait, as far as the controller shows other people's jobs. One call."""
    if not job_ids:
        return {}
    return places_among(run_or_reject(["squeue", "--noheader", "--states=PENDING", f"--format={WAITING_FORMAT}"]), job_ids)


def sacct(job_ids: Sequence[str], since: float, name: str | None = None) -> list[AcctRow]:
    """Accounting records of every start of these jobs, oldest first.

    ``since``: records submitted earlier (epoch s) belong to an older job with the same id; ``name``: likewise for another name.
    """
    ids = sorted(set(job_ids))
    if not ids:
        return []
    which = ids if len(ids) <= MOST_IDS else _arrays(ids)
    out = run_or_reject([*_SACCT, f"--jobs={','.join(which)}", f"--starttime={format_timestamp(since)}"])
    return [row for row in read_accounting(out) if (row.submit or 0.0) >= since and name in (None, row.name)]


def submit_lines(user: str, since: float) -> list[tuple[str, str]]:
    """Ids of the jobs of ``user`` since then (epoch s), each with the command line that submitted it."""
    out = run_or_reject(
        [
            *("sacct", "--allocations", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}", f"--user={user}"),
            *(f"--starttime={format_timestamp(since)}", "--format=JobID,SubmitLine"),
        ]
    )
    return [(job_id, line) for job_id, line in parse_rows(out, 2)]


def show_job(job_id: str) -> JobFacts | None:
    """The controller's record of one job; None when it has forgotten it (MinJobAge after its end) or never knew it."""
    done = run(["scontrol", "show", "job", job_id])
    if done.rc != 0:
        if _forgotten(done.stderr + done.stdout):
            return None
        raise SlurmRejected(reason_line(done.stderr or done.stdout))
    records = read_jobs(done.stdout)
    return next((record for record in records if record.job_id == job_id), records[0] if records else None)


def show_ending(job_id: str) -> JobFacts | None:
    """Like show_job, for a job that is leaving: the controller hides the end behind COMPLETING, so accounting is asked for it.

    ``ended_as`` is then how the start that is ending will be remembered, e.g. CANCELLED, PREEMPTED, TIMEOUT or REQUEUED; None
    where accounting cannot be asked.
    """
    facts = show_job(job_id)
    if facts is None or facts.state != "COMPLETING":
        return facts
    for _ in range(ACCOUNTING_TRIES):
        try:
            rows = sacct([job_id], since=(facts.submit_time or time.time()) - LAG_S)
        except SlurmError:
            return facts
        newest = next((row for row in reversed(rows) if row.job_id == job_id), None)
        if newest is not None and newest.end is not None:
            return replace(facts, ended_as=newest.state)
        time.sleep(ACCOUNTING_EVERY_S)
    return facts


def requeue(job_id: str) -> None:
    """Ask Slurm to bring the job back after this start of it. Raises SlurmRejected when it does not, e.g. for a cancelled job.

    ``Incomplete`` only takes jobs that still run: plain ``requeue`` takes even one that its user has just cancelled. A job whose
    grace or time is over is COMPLETING, so ``Incomplete`` passes it over without a word; it is told from a cancelled one first.
    """
    run_or_reject(["scontrol", "requeue", "Incomplete", job_id])
    facts = show_ending(job_id)
    if facts is not None and facts.requeueing:
        return
    ended_as = None if facts is None else facts.ended_as or facts.state
    if ended_as not in COMES_BACK:
        raise SlurmRejected(f"job {job_id} is {ended_as or 'forgotten'}; Slurm does not bring it back")
    run_or_reject(["scontrol", "requeue", job_id])


def start_soon(job_id: str, not_before: float | None = None) -> bool:
    """Lift the hold after a requeue (121 s by default). True when Slurm took it; the owner may do this.

    It starts some seconds ahead, never at once; see HOLD_WHILE_COMPLETING_S and HOLD_WHEN_PENDING_S. ``not_before``: epoch s;
    the job is put off until then instead.
    """
    facts = show_job(job_id)
    if facts is None:
        return False
    hold = HOLD_WHEN_PENDING_S if facts.state == "PENDING" else HOLD_WHILE_COMPLETING_S
    start = format_timestamp(max(time.time() + hold, not_before or 0.0))
    return run(["scontrol", "update", f"JobId={job_id}", f"StartTime={start}"]).rc == 0


def end_within(job_id: str, seconds: float) -> bool:
    """See to it that a running job ends within ``seconds``, by a shorter time limit if need be. False: Slurm did not take it.

    Slurm counts time limits in whole minutes; they are rounded down here, to one at least. The owner may shorten them.
    """
    facts, now = show_job(job_id), time.time()
    if facts is None or facts.start_time is None:
        return False
    if facts.end_time is not None and facts.end_time <= now + seconds + 1.0:
        return True
    limit = max(60.0, (now - facts.start_time + seconds) // 60 * 60)
    return run(["scontrol", "update", f"JobId={job_id}", f"TimeLimit={format_duration(limit)}"]).rc == 0


def cancel(job_ids: Sequence[str]) -> None:
    """End these jobs for good. Ended and forgotten ones are no error."""
    if job_ids:
        run_or_reject(["scancel", *job_ids])


def limit_array(job_id: str, most: int | None) -> None:
    """At most so many of the array's elements at once (None: any number); those that run go on. The owner may."""
    run_or_reject(["scontrol", "update", f"JobId={job_id}", f"ArrayTaskThrottle={most or 0}"])


def hold(job_id: str) -> None:
    """Start no more of this job or array until ``release``; what runs goes on. The owner may."""
    run_or_reject(["scontrol", "hold", job_id])


def release(job_id: str) -> None:
    run_or_reject(["scontrol", "release", job_id])


def down_nodes(hosts: Sequence[str]) -> dict[str, str]:
    """Those of ``hosts`` that Slurm does not let compute, each with its state and the reason. Drained ones are not among them."""
    if not hosts:
        return {}
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", f"--format=%N{SEPARATOR}%T{SEPARATOR}%E"]
    return read_down(run_or_reject(command))


def exclude_nodes(job_id: str, hosts: str) -> None:
    """Keep a pending job off ``hosts``, a host list; an empty one lifts this. The owner may. Raises SlurmRejected."""
    run_or_reject(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={hosts}"])


def cluster_facts() -> ClusterFacts:
    """How this site's Slurm is set up."""
    return read_cluster(run_or_reject(["scontrol", "show", "config"]))
