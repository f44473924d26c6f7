"""`hpcmoe doctor [cluster=X]`: what this site does to a run, what would go wrong, and what to change. Imports no torch."""

from __future__ import annotations

import getpass
import json
import platform
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpcmoe.cli.words import Parser, add_json
from hpcmoe.errors import UserError
from hpcmoe.files import write_atomic
from hpcmoe.runs.glance import Glancer
from hpcmoe.runs.lead import next_lead_s
from hpcmoe.runs.nodecheck import import_torch
from hpcmoe.runs.nodejob import SLOW_IMPORT_S, look_at_a_node
from hpcmoe.runs.notify import mail_program
from hpcmoe.runs.registry import run_dirs, runs_root
from hpcmoe.runs.rootcheck import check_root
from hpcmoe.slurm.command import SlurmError, SlurmMissing
from hpcmoe.slurm.probe import LEVELS, Asks, Finding, findings
from hpcmoe.slurm.site import Site, ask_site

if TYPE_CHECKING:
    from hpcmoe.config.schema import Config

NEEDED, WANTED = ("sbatch", "squeue", "scontrol", "scancel", "srun"), ("sacct", "sacctmgr", "sinfo")
OLDEST_PYTHON = (3, 11)
WAIT_S = 600.0
NO_CLUSTER = "configuration source"  # what Slurm's commands say where no slurm.conf is to be found


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="hpcmoe doctor",
        description="Look at this site's Slurm, the run root, Python and, with --job, a compute node.",
        epilog="exit codes: 0 ok or warnings, 1 something is bad, 2 usage",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for submit: cluster=leonardo slurm.account=ME ...")
    parser.add_argument("--config-dir", metavar="DIR", help="your own configs")
    parser.add_argument("--job", action="store_true", help="also look at a compute node, by a job of one node and a minute")
    parser.add_argument("--wait", type=float, default=WAIT_S, metavar="S", help="how long that job may wait (default 600)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a cluster profile, e.g. my_conf/cluster/here.yaml")
    add_json(parser)
    args = parser.parse_args(argv)
    config = _config(args.overrides, args.config_dir)
    if args.write is not None and not re.fullmatch(r"[A-Za-z0-9_-]+\.yaml", args.write.name):
        raise UserError(f"--write {args.write}: a profile's file is named NAME.yaml, which cluster=NAME then chooses")
    site, found = _slurm(config, args.overrides)
    asks = _asks(config)
    if site is not None:
        found += findings(site, asks)
        found += _differences(site, config, args.overrides)
    found += check_root(runs_root(), with_slurm=site is not None)
    found += _python()
    if args.job:
        found += _job(site, config, asks, args.wait)
    if args.write is not None:
        found.append(_write(args.write, site, asks))
    worst = max((LEVELS.index(one.level) for one in found if one.level != "unknown"), default=0)
    if args.json:
        print(json.dumps({"findings": [asdict(one) for one in found], "worst": LEVELS[worst]}, indent=2))
    else:
        print(table(found))
    return int(LEVELS[worst] == "bad")


def table(found: list[Finding]) -> str:
    """One line a finding, its cure below it; what is bad once more at the end."""
    lines = []
    for one in found:
        lines.append(f"{one.level:<8} {one.topic:<11} {one.says}")
        if one.fix:
            lines.append(f"{'':<20} -> {one.fix}")
    counts = {level: sum(one.level == level for one in found) for level in LEVELS}
    lines += ["", ", ".join(f"{count} {level}" for level, count in counts.items() if count)]
    return "\n".join(lines)


def _config(overrides: list[str], config_dir: str | None) -> Config | None:
    """The configuration that is asked about, unchecked: a doctor also looks at what could not be submitted."""
    if not overrides:
        return None
    from hpcmoe.config.compose import compose, to_config

    return to_config(compose(overrides, config_dir))


def _names_a_cluster(overrides: list[str]) -> bool:
    return any(word.startswith("cluster=") for word in overrides)


def _asks(config: Config | None) -> Asks:
    """What a run of this configuration asks for, and the longest save and step that runs here have measured."""
    records = Glancer().read_all(run_dirs(runs_root()))
    slurm_runs = [record for record in records if record.scheduler == "slurm"]
    saves = [float(event["save_s"]) for record in slurm_runs for event in record.events if event.get("save_s") is not None]
    steps = [float((record.last_line or {}).get("seconds") or 0.0) for record in slurm_runs] if saves else []
    save_s, step_s = max(saves, default=None), max(steps, default=None)
    if config is None:
        return Asks(user=getpass.getuser(), save_s=save_s, step_s=step_s)
    slurm = config.slurm
    return Asks(
        partition=slurm.partition,
        account=slurm.account,
        qos=slurm.qos,
        time=slurm.time,
        requeue=slurm.requeue,
        stop_lead_s=float(next_lead_s(config.resilience.stop_lead_s, (), slurm.time)),
        user=getpass.getuser(),
        save_s=save_s,
        step_s=step_s,
    )


def _slurm(config: Config | None, overrides: list[str]) -> tuple[Site | None, list[Finding]]:
    """What Slurm says of itself; None and why, where it says nothing."""
    named = config is not None and _names_a_cluster(overrides)
    wanted = named and config is not None and config.cluster.scheduler == "slurm"
    if named and not wanted:
        return None, [Finding("slurm", "ok", "cluster=local uses no Slurm")]
    try:
        return ask_site(getpass.getuser()), list(_commands())
    except SlurmMissing as missing:
        return None, [Finding("slurm", "bad" if wanted else "ok", f"{missing}; cluster=local runs here", None)]
    except SlurmError as error:
        if not wanted and NO_CLUSTER in str(error):
            return None, [Finding("slurm", "ok", f"Slurm's commands are here, but no cluster ({error}); cluster=local runs here")]
        return None, [Finding("slurm", "bad", f"Slurm does not answer: {error}", "try again; ask the site if it lasts")]


def _commands() -> Iterator[Finding]:
    for names, level in ((NEEDED, "bad"), (WANTED, "warn")):
        missing = [name for name in names if not shutil.which(name)]
        if missing:
            yield Finding("slurm", level, f"not on this host: {', '.join(missing)}", "module load slurm, or ask on a login node")


def _differences(site: Site, config: Config | None, overrides: list[str]) -> list[Finding]:
    if config is None or not _names_a_cluster(overrides):
        return []
    from hpcmoe.cli.cluster_profile import differences

    return list(differences(config.cluster, config.gpus_per_node, config.slurm.partition, site))


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if tuple(map(int, version.split(".")[:2])) < OLDEST_PYTHON:
        yield Finding("python", "bad", f"Python {version}", "hpcmoe needs 3.11 or newer")
    torch = import_torch()
    if torch["torch"] is None:
        yield Finding(
            "python", "bad", f"PyTorch cannot be imported: {torch['torch_problem']}", "pip install hpcmoe with its dependencies"
        )
        return
    seconds = torch["torch_import_s"]
    slow = seconds > SLOW_IMPORT_S
    says = f"Python {version}, PyTorch {torch['torch']}, imported here in {seconds:.1f} s"
    yield Finding("python", "warn" if slow else "ok", says, "keep the environment on a faster file system" if slow else None)
    mail = mail_program()
    yield Finding(
        "notify",
        "ok",
        f"notify.mail goes through {mail}" if mail else "notify.mail cannot work from this host: no sendmail, no mail",
    )


def _job(site: Site | None, config: Config | None, asks: Asks, patience_s: float) -> list[Finding]:
    if site is None:
        return [Finding("node", "unknown", "no job without Slurm")]
    from hpcmoe.cli.cluster_profile import main_shape

    chosen = site.partition(asks.partition)
    shape = main_shape(site, chosen.facts.name if chosen else None)
    gpus = config.cluster.device == "cuda" if config is not None else bool(shape and shape.gpus)
    setup = list(config.cluster.setup) if config is not None else []
    env = {**config.cluster.env, **config.env} if config is not None else {}
    return look_at_a_node(runs_root(), asks, gpus, setup, env, patience_s)


def _write(path: Path, site: Site | None, asks: Asks) -> Finding:
    if site is None:
        raise UserError(f"--write {path}: there is no Slurm here that a profile could be written of")
    if path.exists():
        raise UserError(f"--write {path}: it is there already; nothing of yours is overwritten")
    import yaml

    from hpcmoe.cli.cluster_profile import profile_of

    values = profile_of(site, path.stem, asks.partition, time.strftime("%Y-%m-%d"))
    write_atomic(path, "# @package _global_\n" + yaml.safe_dump(values, sort_keys=False, width=120, allow_unicode=True))
    if path.absolute().parent.name == "cluster":
        return Finding("profile", "ok", f"written; use it: --config-dir {path.absolute().parent.parent} cluster={path.stem}")
    return Finding("profile", "ok", f"written to {path}", f"put it into DIR/cluster/ for --config-dir DIR cluster={path.stem}")
