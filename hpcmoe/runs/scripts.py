"""Writing a submission's files: the job script and an array's list of runs. What they say is hpcmoe.runs.jobspec's."""

from __future__ import annotations

from hpcmoe.files import write_atomic
from hpcmoe.runs.jobspec import JobSpec, render


def write_scripts(spec: JobSpec) -> None:
    """Write what the submission needs. Raises UserError.

    An element of an array gets a script of its own only if it must come back as a job of its own. Slurm fails a job without a
    word when the directory of its log does not exist: it is made here.
    """
    text = render(spec)
    spec.script.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(spec.script, text)
    spec.script.chmod(0o755)
    if spec.is_array:
        write_atomic(spec.array_list, "".join(f"{run_dir}\n" for run_dir in spec.run_dirs))
