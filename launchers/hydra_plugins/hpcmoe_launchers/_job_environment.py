"""Inside a submitit job of ours: how a plain callable hears that it must go. Not for runs: the engine has its own ways.

Handlers set a flag and nothing else. Saving and requeueing happen in a thread that waits for the flag.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from types import FrameType

from submitit.core import logger
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment

from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError

_STOP = threading.Event()


def stop_requested() -> bool:
    """A callable without a ``checkpoint`` method asks this at moments where it can stop."""
    return _STOP.is_set()


class HpcmoeJobEnvironment(SlurmJobEnvironment):
    """Chosen by submitit when the job script exports SUBMITIT_EXECUTOR=hpcmoe."""

    @classmethod
    def name(cls) -> str:
        return "hpcmoe"

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        def note(signum: int, frame: FrameType | None) -> None:
            _STOP.set()

        for signum in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(signum, note)
        if self.global_rank == 0 and getattr(submission.function, "checkpoint", None) is not None:
            threading.Thread(target=self._leave, args=(paths, submission), daemon=True).start()

    def _leave(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        """Wait for the flag; then save the callable as its ``checkpoint`` method says, ask Slurm to bring the job back, go."""
        _STOP.wait()
        log = logger.get_logger()
        following = submission._checkpoint_function()
        if following is None:
            log.warning("a stop was requested; the callable's checkpoint method returned nothing to continue with")
            return
        following.set_timeout(submission._timeout_min, submission._timeout_countdown)
        draft = paths.submitted_pickle.with_suffix(f".{uuid.uuid4().hex}.tmp")
        following.dump(draft)
        os.replace(draft, paths.submitted_pickle)
        self._requeue(submission._timeout_countdown)

    def _requeue(self, countdown: int) -> None:
        """A cancelled job stays cancelled; a refusal is told, and the saved callable can be submitted again."""
        try:
            client.requeue(self.job_id)
        except SlurmError as refused:
            logger.get_logger().warning(f"Slurm does not bring job {self.job_id} back: {refused}")
            return
        logger.get_logger().info(f"job {self.job_id} is requeued")
        os._exit(0)  # the function's own thread must not write a result: the job is not over


__all__ = ["HpcmoeJobEnvironment", "JobEnvironment", "stop_requested"]
