"""How the same training is kept going without hpcmoe: by a job script that requeues itself, and by stock submitit.

    python benchmarks/plain_ways.py script|submitit CONFIG RUN_DIR PARTITION     # submits; prints the job id

CONFIG is a run's config.yaml. Both start hpcmoe's own engine, so that steps, checkpoints and the search for the newest sound one
cost and do the same; what they lack is what a training script lacks that nobody taught to stop: its signals are as Python has
them. Otherwise they are written as somebody would who knows Slurm and submitit well. For benchmarks/goodput.py.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import submitit

RANKS = 2  # on one node

# Slurm does not requeue a job that ends inside its grace time, so the script asks for it; a site's own requeue comes on top.
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=plain --partition={partition} --nodes=1 --ntasks-per-node={ranks} --cpus-per-task=1 --gres=gpu:{ranks}
#SBATCH --exclusive --time=00:30:00 --requeue --open-mode=append --output={log}
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 --cpus-per-task=1 {command}
code=$?
if [ $code -ne 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def train(run_dir: Path) -> None:
    """One rank: from the newest checkpoint to the last step, saving every so many steps. Ends the process."""
    job, restart = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    os.environ["HPCMOE_ATTEMPT"] = f"{job}.{restart}"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(20000 + (31 * int(job) + int(restart)) % 10000)
    from hpcmoe.engine.main import run_rank
    from hpcmoe.engine.stop import StopSignals

    run_rank(run_dir, StopSignals(), time.monotonic())  # never installed: nobody listens


class Training:
    """As submitit's documentation has it: called to train, and asked for a checkpoint when its job is preempted.

    submitit asks one rank of several, inside a signal handler, where the others cannot be made to save with it. So the usual
    thing is done: the job starts again from what it saved last. Programs of one process can save here and lose nothing.
    """

    def __call__(self, run_dir: str) -> None:
        train(Path(run_dir))

    def checkpoint(self, run_dir: str) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self, run_dir)


def submit_script(run_dir: Path, partition: str) -> str:
    command = shlex.join([sys.executable, str(Path(__file__).resolve()), "train", str(run_dir)])
    text = SCRIPT.format(partition=partition, ranks=RANKS, log=run_dir / "job.log", command=command)
    done = subprocess.run(["sbatch", "--parsable"], input=text, text=True, check=True, stdout=subprocess.PIPE)
    return done.stdout.strip().partition(";")[0]


def submit_submitit(run_dir: Path, partition: str) -> str:
    executor = submitit.SlurmExecutor(folder=run_dir / "submitit", max_num_timeout=100)
    executor.update_parameters(
        job_name="submitit",
        partition=partition,
        nodes=1,
        ntasks_per_node=RANKS,
        cpus_per_task=1,
        gres=f"gpu:{RANKS}",
        exclusive=True,
        time=30,
        setup=["export OMP_NUM_THREADS=1"],
        srun_args=["--kill-on-bad-exit=1", "--cpus-per-task=1"],
    )
    return str(executor.submit(Training(), str(run_dir)).job_id)


def main(argv: list[str]) -> int:
    if argv[:1] == ["train"]:
        train(Path(argv[1]))
    way, config, run_dir, partition = argv[0], Path(argv[1]), Path(argv[2]), argv[3]
    (run_dir / "control").mkdir(parents=True)
    (run_dir / "config.yaml").write_bytes(config.read_bytes())
    submit = {"script": submit_script, "submitit": submit_submitit}[way]
    print(submit(run_dir, partition))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
