"""What it costs to submit a sweep: from the command line until a real slurmctld has accepted all points.

    python benchmarks/sweep_submit.py --points 1000 --submitit DIR      # as root, with Slurm's packages: starts a testbed

Ways: `hpcmoe submit -m` (our own configs), `hydra/launcher=hpcmoe_slurm` under a small Hydra app, the same app under
`hydra/launcher=submitit_slurm`, and a bare `sbatch --array` that reads a point's words from one file. DIR: where
hydra-submitit-launcher is, `pip install --no-deps --target DIR hydra-submitit-launcher==1.2.0`; it has to share its process with
our Hydra. No point runs: the jobs ask for a start in a week, and are cancelled. Files and bytes are those on disk then, and the
bytes are the files' own, not their blocks. The launcher waits for its jobs by design; its time is up to sbatch's return, by the
wrapper that all ways call. Exit code 1 when an aim is missed: faster than the launcher, within twice the bare array's time, at
most 5 files a point.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.on_testbed import testbed_at  # noqa: E402
from tests.slurm.testbed_client import Testbed  # noqa: E402

LAUNCHER = "hydra-submitit-launcher"
MOST_FILES, MOST_RATIO = 5.0, 2.0
PATIENCE_S = 3600.0
NOT_NOW = "now+7days"

APP = """
import hydra

@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(cfg):
    return cfg.lr

if __name__ == "__main__":
    main()
"""
CONFIG = "lr: 0.1\nseed: 0\nmodel: {width: 128, depth: 4}\ndata: {path: /data, workers: 2}\n"
# Notes when sbatch has answered, and with which job.
WRAPPER = """#!/bin/bash
answer=$({sbatch} "$@") || exit
job=${{answer##* }}  # submitit asks for no --parsable
echo "$EPOCHREALTIME ${{job%%;*}}" >>{log}
echo "$answer"
"""


@dataclass(frozen=True)
class Cost:
    """Of one way to submit."""

    way: str
    wall_s: float  # from the command's start until sbatch's last answer
    cpu_s: float  # of the command and its children
    files_a_point: float
    bytes_a_point: float
    jobs: int  # sbatch calls


class Bench:
    """One testbed, one folder a way."""

    def __init__(self, testbed: Testbed, folder: Path, points: int) -> None:
        self.testbed, self.folder, self.points = testbed, folder, points
        self.seeds = max(1, points // 10)
        self.lrs = [f"{1e-4 * (number + 1):g}" for number in range(-(-points // self.seeds))]

    def grid(self) -> list[str]:
        return [f"lr={','.join(self.lrs)}", f"seed=range({self.seeds})"]

    def measure(self, way: str, command: Sequence[str], waits: bool = False, **env: str) -> Cost:
        """Run ``command`` in an empty folder of its own. ``waits``: it does not return when all is submitted, and is ended."""
        where = self.folder / way.replace(" ", "-").replace("/", "_").replace("=", "_")
        (where / "bin").mkdir(parents=True)
        log = where / "bin" / "log"
        sbatch = self.testbed.run(["which", "sbatch"], check=True).stdout.strip()
        (where / "bin" / "sbatch").write_text(WRAPPER.format(sbatch=sbatch, log=log))
        (where / "bin" / "sbatch").chmod(0o755)
        work = where / "work"
        work.mkdir()
        (work / "conf").mkdir()
        (work / "app.py").write_text(APP)
        (work / "conf" / "app.yaml").write_text(CONFIG)
        before = _on_disk(work)
        environ = {
            **self.testbed.env, **env, "HPCMOE_RUNS": str(work / "runs"),
            "PATH": f"{where / 'bin'}:{self.testbed.env.get('PATH', os.environ['PATH'])}",
        }  # fmt: skip
        used, began = _children_s(), time.time()
        with (where / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=work,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            cpu = None
            if waits:
                cpu = _until_accepted(process, log, self.accepted, self.points)
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait(timeout=PATIENCE_S)
        if code and not waits:
            raise SystemExit(f"{way} failed with exit code {code}:\n{(where / 'output').read_text()[-2000:]}")
        calls = [line.split() for line in log.read_text().splitlines()]
        accepted = sum(self.accepted(job) for _, job, *_ in calls)
        if accepted != self.points:
            raise SystemExit(f"{way}: Slurm has accepted {accepted} of {self.points} points")
        after = _on_disk(work)
        for _, job, *_ in calls:
            self.testbed.run(["scancel", job], check=True)
        return Cost(
            way,
            wall_s=float(calls[-1][0]) - began,
            cpu_s=_children_s() - used if cpu is None else cpu,
            files_a_point=(after[0] - before[0]) / self.points,
            bytes_a_point=(after[1] - before[1]) / self.points,
            jobs=len(calls),
        )

    def accepted(self, job: str) -> int:
        """Elements of the job that Slurm lists."""
        found = self.testbed.run(["squeue", "-h", "-r", "-j", job, "-o", "%i"], check=True)
        return len(found.stdout.split())


def _until_accepted(process: subprocess.Popen[bytes], log: Path, accepted: object, points: int) -> float:
    """CPU seconds of the process when the last sbatch has answered and nothing more follows for a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while not log.exists() or not log.read_text().strip():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the launcher ended without a job; see {log.parent.parent / 'output'}")
        time.sleep(0.05)
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(fields[number]) for number in (11, 12, 13, 14)) / os.sysconf("SC_CLK_TCK")


def _on_disk(folder: Path) -> tuple[int, int]:
    found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts]
    return len(found), sum(path.stat().st_size for path in found)


def _children_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def ways(bench: Bench, submitit: Path | None) -> list[Cost]:
    """All ways, one after the other."""
    python, path = sys.executable, f"{ROOT}:{ROOT / 'launchers'}"
    grid = bench.grid()
    own = [
        "cluster=testbed",
        "model=tiny",
        f"slurm.begin={NOT_NOW}",
        *(word.replace("lr=", "optim.lr=").replace("seed=", "train.seed=") for word in grid),
    ]
    costs = [bench.measure("hpcmoe submit -m", [python, "-m", "hpcmoe", "submit", "-m", "--yes", *own], PYTHONPATH=path)]
    app = [python, "app.py", "-m", *grid]
    later = f"+hydra.launcher.additional_parameters.begin={NOT_NOW}"
    costs.append(
        bench.measure(
            "hydra/launcher=hpcmoe_slurm",
            [*app, "hydra/launcher=hpcmoe_slurm", later, "hydra.launcher.detach=true"],
            PYTHONPATH=path,
        )
    )
    if submitit is not None:
        launcher = [*app, "hydra/launcher=submitit_slurm", later, "hydra.launcher.array_parallelism=1000"]
        costs.append(bench.measure("hydra/launcher=submitit_slurm", launcher, waits=True, PYTHONPATH=str(submitit)))
    lines = "".join(f"lr={lr} seed={seed}\\n" for lr in bench.lrs for seed in range(bench.seeds))
    script = '#!/bin/bash\\nexec python app.py $(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" points.txt)\\n'
    array = f"sbatch --parsable --begin={NOT_NOW} --array=0-{bench.points - 1} job.sh"
    bare = f"printf '{lines}' >points.txt; printf '{script}' >job.sh; {array}"
    costs.append(bench.measure("bare sbatch --array", ["bash", "-c", bare]))
    return costs


def missed(costs: Sequence[Cost]) -> list[str]:
    """The aims that these figures miss, in words."""
    by_way = {cost.way: cost for cost in costs}
    bare, launcher = by_way["bare sbatch --array"], by_way.get("hydra/launcher=submitit_slurm")
    told = []
    for cost in (by_way["hpcmoe submit -m"], by_way["hydra/launcher=hpcmoe_slurm"]):
        if launcher is not None and cost.wall_s >= launcher.wall_s:
            told.append(f"{cost.way}: {cost.wall_s:.1f} s are no less than {LAUNCHER}'s {launcher.wall_s:.1f} s")
        if cost.wall_s > MOST_RATIO * bare.wall_s:
            told.append(
                f"{cost.way}: {cost.wall_s:.1f} s are more than {MOST_RATIO:g} times the bare array's {bare.wall_s:.2f} s"
            )
        if cost.files_a_point > MOST_FILES + 0.5:
            told.append(f"{cost.way}: {cost.files_a_point:.1f} files a point are more than {MOST_FILES:g}")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1000, help="a multiple of 10; up to the site's MaxArraySize")
    parser.add_argument(
        "--submitit", type=Path, metavar="DIR", help=f"where {LAUNCHER} 1.2.0 is installed; without, it is not measured"
    )
    parser.add_argument("--testbed", type=Path, metavar="DIR", help="a testbed that is up")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.submitit is not None and not (args.submitit / "hydra_plugins" / "hydra_submitit_launcher").is_dir():
        raise SystemExit(f"there is no {LAUNCHER} in {args.submitit}: pip install --no-deps --target DIR {LAUNCHER}==1.2.0")
    with testbed_at(args.testbed, None) as testbed, tempfile.TemporaryDirectory(prefix="sweep-submit-") as folder:
        costs = ways(Bench(testbed, Path(folder), args.points), args.submitit)
    told = missed(costs)
    if args.json:
        print(
            json.dumps(
                {"points": args.points, "load": os.getloadavg()[0], "costs": [asdict(c) for c in costs], "missed": told}, indent=2
            )
        )
        return int(bool(told))
    print(f"{args.points} points; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for cost in costs:
        disk = f"{cost.files_a_point:5.2f} files {cost.bytes_a_point:8.0f} bytes a point"
        print(f"{cost.way:<32} {cost.wall_s:7.2f} s wall {cost.cpu_s:7.2f} s CPU  {disk}  {cost.jobs} sbatch")
    if args.submitit is None:
        print(f"{LAUNCHER} was not measured: --submitit DIR says where it is")
    print(*(f"MISSED  {line}" for line in told), sep="\n")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
