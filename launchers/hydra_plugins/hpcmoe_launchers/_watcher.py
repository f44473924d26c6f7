"""submitit's job objects over our Slurm client: squeue decides what is alive, accounting is believed about ends only."""

from __future__ import annotations

import time
from typing import TypeVar

from submitit.core import logger
from submitit.core.core import Job
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError
from hpcmoe.slurm.states import UNKNOWN, is_alive, is_ended

R = TypeVar("R", covariant=True)

# So often must a good squeue lack a job before accounting is believed that it has ended: a requeue passes through an end.
ABSENT_POLLS = 2


class HpcmoeInfoWatcher(SlurmInfoWatcher):
    """States of many jobs with one squeue, and one sacct for those that squeue no longer lists."""

    def __init__(self, delay_s: int = 30) -> None:
        super().__init__(delay_s=delay_s)
        self._absent: dict[str, int] = {}
        self._registered_at: dict[str, float] = {}

    def register_job(self, job_id: str) -> None:
        super().register_job(job_id)
        self._registered_at.setdefault(job_id, time.time())

    def clear(self) -> None:
        super().clear()
        self._absent.clear()

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        state = self.get_state(job_id, mode=mode)
        return is_ended(state) and self._absent.get(job_id, ABSENT_POLLS) >= ABSENT_POLLS

    def update(self) -> None:
        """Ask Slurm about every job that is not known to be over. Silence changes nothing."""
        asked = sorted(self._registered - self._finished)
        self._last_status_check = time.time()
        if not asked:
            return
        self._num_calls += 1
        try:
            rows = client.squeue(asked)
            for job_id in asked:
                if job_id in rows:
                    # An end that the controller itself tells is final; one that only accounting tells needs a second look.
                    self._absent.pop(job_id, None)
                    if is_alive(rows[job_id].state):
                        self._absent[job_id] = 0
                    self._info_dict[job_id] = {"JobID": job_id, "State": rows[job_id].state, "NodeList": rows[job_id].nodelist}
                else:
                    self._absent[job_id] = self._absent.get(job_id, 0) + 1
            self._ask_accounting([job_id for job_id in asked if job_id not in rows])
        except SlurmError as error:
            logger.get_logger().warning(f"Slurm cannot be asked about {len(asked)} jobs, their last known states stand: {error}")
            return
        self._finished.update(job_id for job_id in asked if self.is_done(job_id, mode="cache"))

    def _ask_accounting(self, missing: list[str]) -> None:
        if not missing:
            return
        since = min(self._registered_at[job_id] for job_id in missing) - 86400.0
        newest = {row.job_id: row for row in client.sacct(missing, since=since)}
        for job_id in missing:
            row = newest.get(job_id)
            state = row.state if row is not None and is_ended(row.state) else UNKNOWN
            self._info_dict[job_id] = {"JobID": job_id, "State": state, "NodeList": row.nodelist if row else ""}


class HpcmoeJob(SlurmJob[R]):
    """A job of HpcmoeSlurmExecutor."""

    watcher = HpcmoeInfoWatcher()

    def cancel(self, check: bool = True) -> None:
        try:
            client.cancel([self.job_id])
        except SlurmError:
            if check:
                raise


__all__ = ["HpcmoeInfoWatcher", "HpcmoeJob", "Job"]
