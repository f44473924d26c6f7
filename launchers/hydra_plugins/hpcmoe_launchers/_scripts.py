"""Writing a submission's files: the job script, an array's list of runs, and each of its runs' own script to come back with."""

from __future__ import annotations

from dataclasses import replace

from hpcmoe.files import write_atomic
from hpcmoe.runs.jobspec import JobSpec, render


def write_scripts(spec: JobSpec) -> None:
    """Write everything that the submission needs below the run directories and the sweep directory. Raises UserError.

    Slurm fails a job without a word when the directory of its log does not exist: it is made here.
    """
    text = render(spec)
    spec.script.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(spec.script, text)
    spec.script.chmod(0o755)
    if spec.is_array:
        write_atomic(spec.array_list, "".join(f"{run_dir}\n" for run_dir in spec.run_dirs))
        for run_dir in spec.run_dirs:
            write_scripts(replace(spec, run_dirs=(run_dir,), job_name=f"{spec.job_name}-{run_dir.name}"))
