"""From the keys of ``hydra/launcher=hpcmoe_slurm|hpcmoe_local`` to the config of a run with ``engine=command``.

The keys are hydra-submitit-launcher's; what they become is in docs/hydra.md. Reads a cluster's profile, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from hpcmoe.config.compose import to_config
from hpcmoe.config.names import unknown_key
from hpcmoe.config.schema import Config, SlurmConfig, WrittenConfig
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError, unknown_name
from hpcmoe.resources import resource_dir
from hpcmoe.slurm.directives import quote
from hpcmoe.slurm.parse import parse_duration

# Flags of sbatch by which hpcmoe runs the job; what to set instead.
TAKEN = {
    "array": "hpcmoe makes the array; hydra.launcher.array_parallelism limits it",
    "chdir": "a task starts where it was submitted; hydra.job.chdir=true changes to its output directory",
    "error": "a task's output is in its run's directory",
    "export": "a job gets the environment of its submission",
    "job_name": "set hydra.launcher.name",
    "nodes": "set hydra.launcher.nodes",
    "ntasks": "set hydra.launcher.nodes and hydra.launcher.tasks_per_node",
    "ntasks_per_node": "set hydra.launcher.tasks_per_node",
    "open_mode": "logs are appended to",
    "output": "a task's output is in its run's directory",
    "parsable": "hpcmoe reads sbatch's answer",
    "signal": "set hydra.launcher.signal_delay_s",
    "wrap": "the job runs the task",
}
_FIELDS = frozenset(field.name for field in dataclasses.fields(SlurmConfig)) - {"extra", "srun_extra", "array_parallelism"}


def app_config(scheduler: str, params: Mapping[str, Any], command: list[str]) -> Config:
    """The checked config of a point's run. Raises UserError in the launcher's own words where one of its keys is at fault."""
    given = {name: value for name, value in params.items() if value is not None}
    values = [_slurm(given) if scheduler == "slurm" else _local(given)]
    if given.get("cluster"):
        values.insert(0, _profile(str(given["cluster"])))
    values.append(_own_keys(given.get("hpcmoe", {})))
    values.append({"engine": {"command": command}})
    try:
        merged = OmegaConf.merge(OmegaConf.structured(WrittenConfig), *values)
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise UserError(f"hydra.launcher.hpcmoe: {unknown_key(str(error.full_key))}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.launcher: {error.full_key}: {str(error).splitlines()[0]}") from error
    return validate(to_config(merged))  # type: ignore[arg-type]


def _own_keys(keys: Any) -> dict[str, Any]:
    if not isinstance(keys, dict):
        raise UserError(f"hydra.launcher.hpcmoe={keys!r} must hold keys of hpcmoe's config, such as resilience.max_gpu_hours")
    if "command" in (keys.get("engine") or {}):
        raise UserError("hydra.launcher.hpcmoe.engine.command: the command is the app's own task")
    return keys


def _shared(given: Mapping[str, Any]) -> dict[str, Any]:
    tasks = int(given.get("tasks_per_node", 1))
    return {
        "name": given.get("name"),
        "nodes": given.get("nodes", 1),
        # GPUs are counted where they are asked for; without, a task stands in for one and costs nothing.
        "gpus_per_node": _gpus(given) or tasks,
        "engine": {"name": "command", "tasks_per_node": tasks},
        # A task that raises is FAILED at once, see _run_point; these are for one that dies without a word.
        "resilience": {"ask_above_gpu_hours": None},
    }


def _local(given: Mapping[str, Any]) -> dict[str, Any]:
    if int(given.get("nodes", 1)) != 1:
        raise UserError(f"hydra.launcher.nodes={given['nodes']}: hpcmoe_local is this one machine; hpcmoe_slurm has several")
    cluster = {"name": "local", "scheduler": "local", "device": "cpu", "gres": False, "master_addr": "127.0.0.1"}
    return {**_shared(given), "cluster": cluster}


def _slurm(given: Mapping[str, Any]) -> dict[str, Any]:
    extra = given.get("additional_parameters", {})
    words, flags = _additional({str(name).lstrip("-").replace("-", "_"): value for name, value in extra.items()})
    slurm = {
        "time": _minutes(given.get("timeout_min", 60)),
        **{name: given.get(name) for name in ("partition", "qos", "comment", "constraint", "exclude", "gres", "account")},
        "cpus_per_task": given.get("cpus_per_task"),
        "mem": f"{given['mem_gb']}GB" if "mem_gb" in given else None,
        "job_name": given.get("name"),
        "array_parallelism": given.get("array_parallelism"),
        "extra": [
            f"--{name.replace('_', '-')}={quote(str(given[name]))}"
            for name in ("gpus_per_node", "gpus_per_task", "cpus_per_gpu", "mem_per_gpu", "mem_per_cpu")
            if given.get(name)
        ]
        + flags,
        **words,
    }
    cluster: dict[str, Any] = {"gres": False, "device": "cuda" if _gpus(given) else "cpu"}
    if not given.get("cluster"):
        cluster |= {"name": "slurm", "scheduler": "slurm"}
    if given.get("setup"):
        cluster["setup"] = [str(line) for line in given["setup"]]
    shared = _shared(given)
    shared["resilience"] |= {
        "stop_lead_s": _lead(given.get("signal_delay_s", 120), str(slurm["time"])),
        "max_time_limits": given.get("max_num_timeout", 0),
    }
    return {**shared, "cluster": cluster, "slurm": slurm}


def _minutes(minutes: Any) -> str:
    if int(minutes) <= 0:
        raise UserError(f"hydra.launcher.timeout_min={minutes} must be above zero: such a job would wait for ever")
    return f"{int(minutes) // 60:02d}:{int(minutes) % 60:02d}:00"


def _lead(delay_s: Any, limit: str) -> int:
    """Half of a time limit that is no longer than the warning: a config that submitit takes must not be refused here."""
    try:
        seconds = parse_duration(limit)
    except ValueError:
        return int(delay_s)  # validate has the words for it
    return int(delay_s) if seconds is None or seconds > int(delay_s) else max(1, int(seconds // 2))


def _gpus(given: Mapping[str, Any]) -> int:
    """GPUs a node, as far as the keys say."""
    if given.get("gpus_per_node"):
        return int(given["gpus_per_node"])
    if given.get("gpus_per_task"):
        return int(given["gpus_per_task"]) * int(given.get("tasks_per_node", 1))
    gres = str(given.get("gres", ""))
    count = gres.partition("(")[0].rpartition(":")[2]
    return (int(count) if count.isdigit() else 1) if gres.startswith("gpu") else 0


def _additional(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """sbatch's words that the schema has, and all others as flags."""
    words: dict[str, Any] = {}
    flags: list[str] = []
    for name, value in parameters.items():
        if name in TAKEN:
            raise UserError(f"hydra.launcher.additional_parameters.{name}: {TAKEN[name]}")
        if value is None or value is False:
            continue
        if name in _FIELDS and (value is True) == (name in ("exclusive", "requeue")):
            words[name] = value if isinstance(value, (bool, int)) else str(value)
        elif name == "no_requeue":
            words["requeue"] = False
        else:
            flag = f"--{name.replace('_', '-')}"
            flags.append(flag if value is True else f"{flag}={quote(str(value))}")
    return words, flags


def _profile(name: str) -> dict[str, Any]:
    """``cluster`` of one of hpcmoe's profiles, or of a file of the user's own."""
    folder = resource_dir("conf") / "cluster"
    path = folder / f"{name}.yaml" if "/" not in name and not name.endswith(".yaml") else Path(name).expanduser()
    if not path.is_file():
        if path.parent != folder:
            raise UserError(f"hydra.launcher.cluster={name}: there is no such file")
        raise UserError(unknown_name("hydra.launcher.cluster", name, [profile.stem for profile in folder.glob("*.yaml")]))
    loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
    cluster = loaded.get("cluster") if isinstance(loaded, dict) else None
    if not isinstance(cluster, dict):
        raise UserError(f"{path} is no cluster profile: it has no 'cluster'")
    if cluster.get("scheduler", "slurm") != "slurm":
        raise UserError(f"hydra.launcher.cluster={name} has no Slurm; hydra/launcher=hpcmoe_local is for this machine")
    return {"cluster": cluster}
