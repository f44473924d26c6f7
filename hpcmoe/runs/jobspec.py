"""What is to be submitted, as a value, and its job script as text. Pure: nothing is written, no scheduler is asked.

The script's wording lies in slurm_templates/; who hands it to a scheduler is hydra_plugins.hpcmoe_launchers.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcmoe.config.schema import Config, SlurmConfig
from hpcmoe.errors import UserError
from hpcmoe.resources import resource_dir
from hpcmoe.runs.lead import next_lead_s
from hpcmoe.runs.rundir import RunDir
from hpcmoe.slurm.directives import check_carries, directive, filename_pattern, verbatim

if TYPE_CHECKING:
    from jinja2 import Environment

PREFLIGHT_MINUTES = 3  # for srun's start and PyTorch's import, beside the minute that the tests themselves may take


@dataclass(frozen=True)
class JobSpec:
    """One submission: a run, or several runs of one job shape as an array."""

    run_dirs: tuple[Path, ...]
    config: Config  # of the run; of an array: of any of its runs, which differ in nothing that the script needs
    python: str
    job_name: str
    token: str  # unique to this submission
    dependency: str | None = None
    sweep_dir: Path | None = None  # of an array: where its script, its list of runs and its logs lie
    part: int = 0  # which of the sweep's arrays
    at_once: int | None = None  # of an array: most elements at once; 0: no bound; None: slurm.array_parallelism
    sbatch_args: tuple[str, ...] = ()  # flags of this one submission, which win over the script's

    @property
    def is_array(self) -> bool:
        return len(self.run_dirs) > 1

    @property
    def script(self) -> Path:
        """Where the job script belongs."""
        if not self.is_array:
            return self.run_dirs[0] / "sbatch" / "attempt.sh"
        return self._sweep / "sbatch" / f"array-{self.part}.sh"

    @property
    def array_list(self) -> Path:
        """An array's list of run directories, one a line; task N takes line N + 1."""
        return self._sweep / "sbatch" / f"array-{self.part}.txt"

    @property
    def _sweep(self) -> Path:
        assert self.sweep_dir is not None, "several runs in one job need a sweep directory"
        return self.sweep_dir

    def log_pattern(self) -> str:
        """The batch shell's log, in sbatch's words: %j is the job's id, %A_%a the array's and the task's."""
        name = "slurm-%A_%a.log" if self.is_array else "slurm-%j.log"
        return filename_pattern(str(self.script.parent)) + f"/{name}"


def job_spec(run: RunDir, cfg: Config, token: str | None = None) -> JobSpec:
    """What is to be submitted for one run."""
    return JobSpec(
        run_dirs=(run.path,),
        config=cfg,
        python=sys.executable,
        job_name=cfg.slurm.job_name or f"hpcmoe-{run.run_id}",
        token=token or run.run_id,
    )


def job_shape(cfg: Config) -> str:
    """Equal for runs that may be elements of one array: they differ in nothing that Slurm or the job script sees.

    Raises UserError for what a job script cannot carry, as ``render`` does.
    """
    spec = JobSpec((Path("/RUN"),), cfg, sys.executable, cfg.slurm.job_name or "NAME", "TOKEN")
    words = _local_words(spec) if cfg.cluster.scheduler == "local" else _slurm_words(spec)
    return hashlib.sha256(json.dumps(words, default=str).encode()).hexdigest()[:12]


def render(spec: JobSpec) -> str:
    """The job script. Raises UserError for values that Slurm or a shell cannot carry."""
    for path in (*spec.run_dirs, *([spec.sweep_dir] if spec.sweep_dir else [])):
        check_carries("run directory", str(path))
    check_carries("python", spec.python)
    local = spec.config.cluster.scheduler == "local"
    return fill_template("local.sh.j2" if local else "slurm.sh.j2", _local_words(spec) if local else _slurm_words(spec))


def fill_template(name: str, words: dict[str, Any]) -> str:
    """A file of slurm_templates/ with ``words`` in it. A word that a template needs and does not get is an error."""
    return str(_templates().get_template(name).render(words))


@cache
def _templates() -> Environment:
    """Kept, as a sweep has a script for each of its runs, and to compile a template costs more than to fill it in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(resource_dir("slurm_templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    templates.filters["sh"] = lambda value: shlex.quote(str(value))
    return templates


def _shared_words(spec: JobSpec) -> dict[str, Any]:
    config = spec.config
    env = {**config.cluster.env, **config.env}
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UserError(f"env: {name!r} is no name for an environment variable; letters, digits and _ are")
        if "\0" in value:
            raise UserError(f"env.{name} holds a NUL character; an environment variable cannot")
    return {
        "python": spec.python,
        "run_dir": spec.run_dirs[0],
        "setup": config.cluster.setup,
        "env": env,
        "rank_module": "hpcmoe.engine.command" if config.runs_command else "hpcmoe.engine",
    }


def _local_words(spec: JobSpec) -> dict[str, Any]:
    if spec.config.nodes != 1:
        raise UserError(f"nodes={spec.config.nodes}: cluster={spec.config.cluster.name} is this one machine; use gpus_per_node=N")
    return {
        **_shared_words(spec),
        "world_size": spec.config.nodes * spec.config.tasks_per_node,
        "kill_wait_s": spec.config.resilience.kill_wait_s,
        "queue_lock": spec.sweep_dir / "sbatch" / "queue.lock" if spec.sweep_dir else None,
    }


def _slurm_words(spec: JobSpec) -> dict[str, Any]:
    return {
        **_shared_words(spec),
        "directives": directives(spec),
        "srun_flags": srun_flags(spec.config),
        "preflight_flags": preflight_flags(spec.config) if spec.config.resilience.preflight else None,
        "array_list": spec.array_list if spec.is_array else None,
        "master_addr": _host_pattern(spec.config.cluster.master_addr or "{host}"),
    }


def _host_pattern(pattern: str) -> str:
    """``{host}i`` as a word of bash in which $host is filled in."""
    check_carries("cluster.master_addr", pattern)
    return "".join('"$host"' if piece == "{host}" else shlex.quote(piece) for piece in re.split(r"(\{host\})", pattern) if piece)


def directives(spec: JobSpec) -> list[str]:
    """The #SBATCH lines: first what hpcmoe decides, then the user's words, last their extra flags."""
    config, slurm = spec.config, spec.config.slurm
    lines = [
        directive("job-name", spec.job_name),
        directive("nodes", _nodes(config)),
        *([] if config.elastic else [directive("ntasks-per-node", config.tasks_per_node)]),
        directive("output", spec.log_pattern()),
        directive("open-mode", "append"),
        directive("requeue" if slurm.requeue else "no-requeue"),
        directive("signal", f"B:USR1@{next_lead_s(config.resilience.stop_lead_s, (), slurm.time)}"),
        directive("export", "ALL"),
    ]
    if spec.is_array:
        at_once = slurm.array_parallelism if spec.at_once is None else spec.at_once
        most = f"%{at_once}" if at_once else ""
        lines.append(directive("array", f"0-{len(spec.run_dirs) - 1}{most}"))
    gres = slurm.gres or (f"gpu:{config.gpus_per_node}" if config.cluster.gres else None)
    dependency = ",".join(filter(None, (slurm.dependency, spec.dependency)))
    lines += [directive(flag, value) for flag, value in _user_words(slurm, _cpus_per_task(config), gres, dependency or None)]
    if slurm.exclusive:
        lines.append(directive("exclusive"))
    return lines + [verbatim(extra) for extra in slurm.extra]


def _nodes(config: Config) -> str:
    """sbatch's --nodes: with the spare ones, and for an elastic run the fewest and the most."""
    most = config.nodes + config.spare_nodes
    return str(most) if config.min_nodes is None else f"{config.min_nodes + config.spare_nodes}-{most}"


def _cpus_per_task(config: Config) -> int | None:
    """sbatch's --cpus-per-task: a rank's, or of an elastic run a node's.

    Slurm gives a job no more nodes than it has tasks, and reckons the tasks of ``--nodes=1-8 --ntasks-per-node=4`` from the
    fewest nodes: 4. So an elastic job asks for one task a node with the CPUs of all its ranks; srun starts the ranks in it.
    """
    return config.gpus_per_node * (config.slurm.cpus_per_task or 1) if config.elastic else config.slurm.cpus_per_task


def _user_words(
    slurm: SlurmConfig, cpus_per_task: int | None, gres: str | None, dependency: str | None
) -> list[tuple[str, str | int]]:
    words: list[tuple[str, str | int | None]] = [
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("time", slurm.time),
        ("gres", gres),
        ("cpus-per-task", cpus_per_task),
        ("mem", slurm.mem),
        ("constraint", slurm.constraint),
        ("reservation", slurm.reservation),
        ("nodelist", slurm.nodelist),
        ("exclude", slurm.exclude),
        ("licenses", slurm.licenses),
        ("dependency", dependency),
        ("begin", slurm.begin),
        ("nice", slurm.nice),
        ("wckey", slurm.wckey),
        ("comment", slurm.comment),
        ("mail-user", slurm.mail_user),
        ("mail-type", slurm.mail_type),
    ]
    return [(flag, value) for flag, value in words if value is not None]


def srun_flags(config: Config) -> list[str]:
    """Flags of srun as words of bash. Everything that Slurm's versions hand from sbatch to srun differently is said again."""
    return [
        *_tasks("nodes", config),
        '${left_out:+"--exclude=$left_out"}',
        "--kill-on-bad-exit=1",
        f"--wait={config.resilience.kill_wait_s}",
        *_common('--output="${attempt_dir//%/%%}/rank-%4t.log"'),
        *_extra(config),
    ]


def preflight_flags(config: Config) -> list[str]:
    """The same for the test of all nodes: a task that fails ends none of the others, and Slurm ends those that hang."""
    return [
        *_tasks("SLURM_JOB_NUM_NODES", config),
        "--kill-on-bad-exit=0",
        "--wait=0",
        f"--time={PREFLIGHT_MINUTES}",
        *_common('--output="${attempt_dir//%/%%}/preflight/rank-%4t.log"'),
        *_extra(config),
    ]


def _tasks(nodes: str, config: Config) -> list[str]:
    flags = [
        f'--nodes="${nodes}"',
        f"--ntasks=$(({nodes} * {config.tasks_per_node}))",
        f"--ntasks-per-node={config.tasks_per_node}",
    ]
    cpus = config.slurm.cpus_per_task or (1 if config.elastic else None)
    if cpus is not None:
        flags.append(f"--cpus-per-task={cpus}")
    return flags


def _common(output: str) -> list[str]:
    return ["--export=ALL", "--mpi=none", "--input=none", "--open-mode=append", output]


def _extra(config: Config) -> list[str]:
    flags = []
    for extra in config.slurm.srun_extra:
        check_carries("slurm.srun_extra", extra)
        if not extra.startswith("-"):
            raise UserError(f"slurm.srun_extra: {extra!r} is no flag; it must start with '-', e.g. --cpu-bind=cores")
        flags.append(shlex.quote(extra))
    return flags
