"""What Slurm says, as frozen values, and how its output becomes them. Pure: hpcmoe.slurm.client asks, this reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcmoe.slurm.parse import (
    SEPARATOR,
    expand_hostlist,
    parse_config,
    parse_duration,
    parse_job_id,
    parse_records,
    parse_rows,
    parse_seconds,
    parse_timestamp,
)
from hpcmoe.slurm.states import base_state


@dataclass(frozen=True)
class QueueRow:
    """One job in the controller's memory. Times are epoch seconds; None: not known (yet)."""

    job_id: str  # array tasks: "123_4"
    state: str
    reason: str
    submit: float | None
    start: float | None  # real, or expected while pending
    end: float | None  # real, or at the time limit
    nodes: int
    nodelist: str
    user: str
    name: str
    comment: str


QUEUE_COLUMNS = ("%i", "%T", "%r", "%V", "%S", "%e", "%D", "%N", "%u", "%j", "%k")
QUEUE_FORMAT = SEPARATOR.join(QUEUE_COLUMNS)


def read_queue(text: str) -> dict[str, QueueRow]:
    """Rows of ``squeue -h -r -o QUEUE_FORMAT`` by job id. A list of tasks in one row becomes one entry a task."""
    found: dict[str, QueueRow] = {}
    for ids, state, reason, submit, start, end, nodes, hosts, user, name, comment in parse_rows(text, len(QUEUE_COLUMNS)):
        for job_id in parse_job_id(ids).each():
            found[job_id] = QueueRow(
                job_id=job_id,
                state=base_state(state),
                reason=reason,
                submit=parse_timestamp(submit),
                start=parse_timestamp(start),
                end=parse_timestamp(end),
                nodes=int(nodes) if nodes.isdigit() else 0,
                nodelist=hosts,
                user=user,
                name=name,
                comment="" if comment == "(null)" else comment,
            )
    return found


def read_down(text: str) -> dict[str, str]:
    """Nodes of ``sinfo -h -N -o NODE,STATE,REASON`` that failed, once each: down, failing, or without a sign of life (``*``)."""
    found: dict[str, str] = {}
    for node, state, reason in parse_rows(text, 3):
        if state.startswith(("down", "fail", "error")) or state.endswith("*"):
            found[node] = f"{state}: {reason}" if reason not in ("", "none") else state
    return found


@dataclass(frozen=True)
class AcctRow:
    """One record of Slurm's accounting: one start of a job. A requeued job has one a start, oldest first."""

    job_id: str
    name: str
    state: str
    exit_code: int  # of the batch script; 128 + N when signal N ended it
    submit: float | None
    start: float | None
    end: float | None
    elapsed_s: float
    alloc_gpus: int
    nodelist: str


ACCT_COLUMNS = ("JobID", "State", "ExitCode", "Submit", "Start", "End", "ElapsedRaw", "AllocTRES", "NodeList", "JobName")


def read_accounting(text: str) -> list[AcctRow]:
    """Rows of ``sacct -D -X -n -P`` with ACCT_COLUMNS, in the order of their starts; steps are left out."""
    rows: list[AcctRow] = []
    for ids, state, code, submit, start, end, elapsed, tres, hosts, name in parse_rows(text, len(ACCT_COLUMNS)):
        if "." in ids:
            continue
        for job_id in parse_job_id(ids).each():
            rows.append(
                AcctRow(
                    job_id=job_id,
                    name=name,
                    state=base_state(state),
                    exit_code=read_exit_code(code),
                    submit=parse_timestamp(submit),
                    start=parse_timestamp(start),
                    end=parse_timestamp(end),
                    elapsed_s=float(elapsed) if elapsed.isdigit() else 0.0,
                    alloc_gpus=gpus_of(tres),
                    nodelist="" if hosts == "None assigned" else hosts,
                )
            )
    return sorted(rows, key=lambda row: (row.submit or 0.0, row.start or float("inf")))


def read_exit_code(text: str) -> int:
    """Slurm's ``code:signal`` as a shell's exit code. What cannot be read counts as a failure."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None:
        return 1
    return 128 + int(match[2]) if int(match[2]) else int(match[1])


def gpus_of(tres: str) -> int:
    """GPUs in a TRES list like ``billing=8,cpu=8,gres/gpu=4,gres/gpu:a100=4``; the typed ones only where no total is given."""
    counts = dict(entry.partition("=")[::2] for entry in tres.split(","))
    if counts.get("gres/gpu", "").isdigit():
        return int(counts["gres/gpu"])
    return sum(int(count) for name, count in counts.items() if name.startswith("gres/gpu:") and count.isdigit())


@dataclass(frozen=True)
class JobFacts:
    """The controller's own record of one job. Times are epoch seconds; None: not known, or not (yet) so."""

    job_id: str
    state: str
    reason: str
    preempt_time: float | None  # Slurm has chosen this job to be preempted
    submit_time: float | None
    start_time: float | None
    end_time: float | None  # real, or at the time limit; moves nearer at preemption
    begin_time: float | None  # not before this: EligibleTime
    time_limit_s: float | None
    run_time_s: float | None
    restarts: int
    requeue_allowed: bool
    batch_host: str | None
    hosts: tuple[str, ...]
    exit_code: int
    name: str
    comment: str
    ended_as: str | None = None  # what hides behind COMPLETING, where accounting told it

    @property
    def requeueing(self) -> bool:
        """Slurm is bringing the job back already.

        COMPLETING hides whether PENDING or an end comes next. A job that comes back is a new one in the controller's memory: it
        has not run at all, and its end is not known or a whole time limit ahead. An ended job has its real end there.
        """
        if self.state != "COMPLETING":
            return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
        if self.run_time_s != 0.0:
            return False
        if self.end_time is None or self.start_time is None:
            return True
        return bool(self.time_limit_s) and self.end_time - self.start_time >= (self.time_limit_s or 0.0)


def read_jobs(text: str) -> list[JobFacts]:
    """Records of ``scontrol show job``."""
    return [_job(record) for record in parse_records(text) if "JobId" in record]


def _job(record: dict[str, str]) -> JobFacts:
    job_id = record["JobId"]
    task = record.get("ArrayTaskId", "")
    if record.get("ArrayJobId") and task.isdigit():
        job_id = f"{record['ArrayJobId']}_{task}"
    host = record.get("BatchHost")
    return JobFacts(
        job_id=job_id,
        state=base_state(record.get("JobState", "")),
        reason=record.get("Reason", ""),
        preempt_time=parse_timestamp(record.get("PreemptTime", "")),
        submit_time=parse_timestamp(record.get("SubmitTime", "")),
        start_time=parse_timestamp(record.get("StartTime", "")),
        end_time=parse_timestamp(record.get("EndTime", "")),
        begin_time=parse_timestamp(record.get("EligibleTime", "")),
        time_limit_s=parse_duration(record.get("TimeLimit", "")),
        run_time_s=parse_duration(record.get("RunTime", "")),
        restarts=int(record.get("Restarts", "0") or 0),
        requeue_allowed=record.get("Requeue") == "1",
        batch_host=None if host in (None, "", "(null)") else host,
        hosts=tuple(expand_hostlist(record.get("NodeList", ""))),
        exit_code=read_exit_code(record.get("ExitCode", "")),
        name=record.get("JobName", ""),
        comment="" if record.get("Comment") in (None, "(null)") else record["Comment"],
    )


@dataclass(frozen=True)
class ClusterFacts:
    """How this site's Slurm is set up (``scontrol show config``), as far as the life of a run depends on it. Times in seconds."""

    version: tuple[int, ...]
    cluster_name: str
    kill_wait_s: float | None
    preempt_type: str
    preempt_mode: str
    user_signal: bool  # --signal's signal is sent at preemption, in place of the first TERM
    job_requeue: bool  # jobs may be requeued unless they say --no-requeue
    max_array_size: int  # most tasks of an array: MaxArraySize caps the index (0 .. MaxArraySize - 1), max_array_tasks the tasks
    message_timeout_s: float
    min_job_age_s: float  # ended jobs are forgotten by the controller after this
    accounting: bool
    auth_cred_expire_s: float  # a requeued job waits this long and one second more before it may start


def read_cluster(text: str) -> ClusterFacts:
    """From the text of ``scontrol show config``."""
    config = parse_config(text)
    signals = config.get("SlurmctldParameters", "") + "," + config.get("PreemptParameters", "")
    version = re.search(r"\d+(?:\.\d+)*", config.get("SLURM_VERSION", ""))
    expire = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    size = config.get("MaxArraySize", "")
    tasks = re.search(r"max_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
    most = int(size) if size.isdigit() else 1001
    return ClusterFacts(
        version=tuple(int(part) for part in version[0].split(".")) if version else (),
        cluster_name=config.get("ClusterName", ""),
        kill_wait_s=parse_seconds(config.get("KillWait", "")),
        preempt_type=config.get("PreemptType", ""),
        preempt_mode=config.get("PreemptMode", ""),
        user_signal=bool({"preempt_send_user_signal", "send_user_signal"} & set(signals.split(","))),
        job_requeue=config.get("JobRequeue", "1") != "0",
        max_array_size=min(most, int(tasks[1])) if tasks else most,
        message_timeout_s=parse_seconds(config.get("MessageTimeout", "")) or 10.0,
        min_job_age_s=parse_seconds(config.get("MinJobAge", "")) or 300.0,
        accounting=config.get("AccountingStorageType", "") not in ("", "(null)", "accounting_storage/none"),
        auth_cred_expire_s=float(expire[1]) if expire else 120.0,
    )


@dataclass(frozen=True)
class PartitionFacts:
    """A partition's rules. ``max_time_s`` None: unlimited."""

    name: str
    preempt_mode: str
    grace_s: float
    max_time_s: float | None
    default_time_s: float | None
    max_nodes: int | None
    up: bool


def partition_of(record: Mapping[str, str]) -> PartitionFacts:
    """From one record of ``scontrol show partition``."""
    nodes = record.get("MaxNodes", "")
    return PartitionFacts(
        name=record["PartitionName"],
        preempt_mode=record.get("PreemptMode", "OFF"),
        grace_s=parse_seconds(record.get("GraceTime", "")) or 0.0,
        max_time_s=parse_duration(record.get("MaxTime", "")),
        default_time_s=parse_duration(record.get("DefaultTime", "").replace("NONE", "")),
        max_nodes=int(nodes) if nodes.isdigit() else None,
        up=record.get("State", "UP") == "UP",
    )
