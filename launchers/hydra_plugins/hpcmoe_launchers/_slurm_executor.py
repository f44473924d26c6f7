"""submitit's Slurm executor over our templates: plain callables by submitit's own API, runs of hpcmoe by ``submit_run``."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm.slurm import SlurmExecutor

from hpcmoe.runs.jobspec import JobSpec
from hpcmoe.runs.scripts import write_scripts
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmError, SlurmMissing
from hpcmoe.slurm.parse import parse_submitted
from hpcmoe.slurm.submit import sbatch
from hydra_plugins.hpcmoe_launchers._job_environment import HpcmoeJobEnvironment
from hydra_plugins.hpcmoe_launchers._task_script import task_script
from hydra_plugins.hpcmoe_launchers._watcher import HpcmoeJob

__all__ = ["HpcmoeJobEnvironment", "HpcmoeSlurmExecutor"]


class HpcmoeSlurmExecutor(SlurmExecutor):
    """Takes the parameters of submitit's SlurmExecutor (``update_parameters``); jobs are submitted once, arrays in chunks."""

    job_class = HpcmoeJob

    def __init__(self, folder: str | Path, max_num_timeout: int = 3, max_pickle_size_gb: float = 1.0, python: str | None = None):
        if shutil.which("sbatch") is None:
            raise SlurmMissing("no 'sbatch' on this machine: submit from a login node of the cluster, or use cluster=local")
        super().__init__(folder, max_num_timeout, max_pickle_size_gb, python)

    @classmethod
    def name(cls) -> str:
        return "hpcmoe"

    @classmethod
    def affinity(cls) -> int:
        return -1 if shutil.which("srun") is None else 1  # below submitit's own: ours is chosen by name

    def submit_run(self, spec: JobSpec) -> list[str]:
        """Submit a run, or an array of runs. Returns a job id for each run: ``["123"]``, or ``["123_0", "123_1"]``."""
        write_scripts(spec)
        job_id = sbatch(spec.script, spec.sbatch_args, spec.token)
        return [f"{job_id}_{task}" for task in range(len(spec.run_dirs))] if spec.is_array else [job_id]

    # ---- submitit's API for plain callables ---------------------------------------------------------------------------

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return task_script(command, self.folder, self.parameters)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string if isinstance(string, str) else string.decode()
        try:
            return parse_submitted(text)
        except ValueError as error:
            raise utils.FailedSubmissionError(str(error)) from error

    def _submit_command(self, command: str) -> core.Job[Any]:
        """Like submitit's, with a submission that happens once even when Slurm's answer is lost."""
        uid = uuid.uuid4().hex
        script = utils.JobPaths.get_first_id_independent_folder(self.folder) / f"submission_file_{uid}.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(self._make_submission_file_text(command, uid), encoding="utf-8")
        try:
            job_id = sbatch(script, token=uid)
        except SlurmError as error:
            raise utils.FailedSubmissionError(str(error)) from error
        job: core.Job[Any] = self.job_class(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks())))
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job

    def _internal_process_submissions(self, delayed_submissions: Sequence[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        if len(delayed_submissions) == 1:
            return super()._internal_process_submissions(list(delayed_submissions))
        # MaxArraySize caps the index, so that an array may have as many tasks.
        most = client.cluster_facts().max_array_size
        jobs: list[core.Job[Any]] = []
        for first in range(0, len(delayed_submissions), most):
            jobs += self._submit_array(delayed_submissions[first : first + most])
        return jobs

    def _submit_array(self, submissions: Iterable[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        pickles = []
        for submission in submissions:
            submission.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            pickles.append(folder / f"{uuid.uuid4().hex}.pkl")
            submission.dump(pickles[-1])
        array = type(self)(self.folder, self.max_num_timeout, self.max_pickle_size_gb, self.python)
        array.parameters = {**self.parameters, "map_count": len(pickles)}
        self._throttle()
        first_job = array._submit_command(self._submitit_command_str)
        tasks = list(range(first_job.num_tasks))
        jobs: list[core.Job[Any]] = []
        for index, path in enumerate(pickles):
            job: core.Job[Any] = self.job_class(folder=self.folder, job_id=f"{first_job.job_id}_{index}", tasks=tasks)
            job.paths.move_temporary_file(path, "submitted_pickle")
            jobs.append(job)
        return jobs
