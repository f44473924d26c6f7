"""`hpcmoe submit [OVERRIDES]`: composes a run's config as any Hydra app does, checks it, and hands the run to a scheduler.

With -m Hydra's sweeper and launcher take over (hydra_plugins.hpcmoe_launchers). Never imports torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, NoReturn

from hpcmoe.config.compose import ROOT, opened_hydra, to_config
from hpcmoe.config.freeze import to_plain, to_yaml
from hpcmoe.config.names import schema_keys, unknown_key
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.runs.estimate import confirm, estimate_gpu_hours

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from hydra.types import RunMode

    from hpcmoe.config.schema import Config
    from hpcmoe.planner.plan import Plan


USAGE = """\
usage: hpcmoe submit [OVERRIDES] [FLAGS]

Starts a run, or with -m a sweep of runs. Overrides are Hydra's: group=option, key=value, +key=value, ~key.

  --yes              do not ask before a costly submission (resilience.ask_above_gpu_hours)
  --wait             follow the run and exit with its result; with -m, follow all runs and exit with the worst
  --dry-run          print the job script and the resolved config, with -m the table of points and a script for each shape of
                     job; submit nothing
  --json             one JSON document on stdout; messages go to stderr
  -m, --multirun     one run for each point of key=a,b,c, as one Slurm array
  --sweep SWEEP      with -m, add the points to a sweep that is there; those that it has are skipped
  --cfg job          print the config instead (also hydra, all); with --resolve, --package P
  --config-dir D     a directory of your own configs beside these; --config-name N another root
  --info WHAT        where configs come from: all, defaults, defaults-tree, searchpath, plugins
  --hydra-help       Hydra's own settings

example: hpcmoe submit model=tiny cluster=local train.steps=50 --wait

Groups (group=option; experiments with a +: +experiment=smoke). Every key: hpcmoe submit --cfg job
"""


def main(argv: list[str]) -> int:
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    args.config_name = args.config_name or ROOT
    _one_command(args)
    if args.multirun or "hydra.mode=MULTIRUN" in args.overrides:
        from hpcmoe.cli.multirun import submit_sweep

        return submit_sweep(args)
    if args.sweep is not None:
        raise UserError(f"--sweep {args.sweep} goes with -m: it adds points to a sweep")
    with opened_hydra(args.config_dir, args.config_path) as hydra:
        if _show(hydra, parser, args):
            return 0
        composed = hydra.compose_config(args.config_name, args.overrides, run_mode=_run_mode(), with_log_configuration=False)
    config = validate(to_config(composed))
    plan = _plan(config)
    if args.dry_run:
        preview(config, args.json)
        return 0
    if plan is not None:
        from hpcmoe.planner.check import summary

        print(summary(plan), file=sys.stderr if args.json else sys.stdout)
    hours = estimate_gpu_hours(config, plan.tokens_per_s if plan is not None else None)
    confirm([hours], config.resilience.ask_above_gpu_hours, args.yes)
    return _submit(config, args)


def _plan(config: Config) -> Plan | None:
    """Let the planner refuse what cannot run and fill in the queue; what it expects.

    Where nothing is known of a machine's memory and queues it has nothing to refuse, and its import is not waited for.
    """
    if (config.runs_command or config.cluster.gpu.mem_gib is None) and not config.cluster.qos:
        return None
    from hpcmoe.planner.check import prepare

    return prepare(config)


def _run_mode() -> RunMode:
    from hydra.types import RunMode

    return RunMode.RUN


class _Parser(argparse.ArgumentParser):
    """Hydra's parser is taken in as it is; complaints become UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"submit: {message}; `hpcmoe submit --help` lists the flags")


def _parser() -> argparse.ArgumentParser:
    """Hydra's own command line, and our flags."""
    from hydra._internal.utils import get_args_parser

    parser = _Parser(prog="hpcmoe submit", add_help=False, parents=[get_args_parser()])
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before a costly submission")
    parser.add_argument("--wait", action="store_true", help="follow the run and exit with its result")
    parser.add_argument("--sweep", metavar="SWEEP", help="with -m: add the points to this sweep")
    parser.add_argument("--dry-run", action="store_true", help="print the job script and the resolved config; submit nothing")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout; messages go to stderr")
    return parser


def _one_command(args: argparse.Namespace) -> None:
    """Hydra's rule: at most one of its commands. Two of them make no sense here."""
    commands = {"--run": args.run, "--multirun": args.multirun, "--cfg": args.cfg, "--info": args.info}
    chosen = [flag for flag, given in commands.items() if given]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} do not go together: choose one")
    if args.resolve and not (args.cfg or args.help):
        raise UserError("--resolve goes with --cfg or --help")
    if args.cfg == "job" and args.package not in (None, "_global_", *schema_keys()):
        raise UserError(unknown_key(args.package))
    if args.shell_completion or args.experimental_rerun:
        flag = "--shell-completion" if args.shell_completion else "--experimental-rerun"
        raise UserError(f"{flag} is not for hpcmoe submit; `hpcmoe resume RUN` brings a run back")


def _show(hydra: Hydra, parser: argparse.ArgumentParser, args: argparse.Namespace) -> bool:
    """Hydra's ways to look at a config instead of using it; False when none was asked for."""
    if args.help:
        print(USAGE + hydra.format_config_groups(lambda group: not group.startswith("hydra")).rstrip())
    elif args.hydra_help:
        args.overrides += [f"hydra/{group}=default" for group in ("help", "hydra_help")]
        hydra.hydra_help(args.config_name, parser, args)
    elif args.cfg:
        hydra.show_cfg(args.config_name, args.overrides, args.cfg, args.package, args.resolve)
    elif args.info:
        hydra.show_info(args.info, args.config_name, args.overrides)
    else:
        return False
    return True


def _submit(config: Config, args: argparse.Namespace) -> int:
    from hpcmoe.runs.create import create_run, submit_run

    run = create_run(config, args.overrides)
    job_id = submit_run(run, config)
    messages = sys.stderr if args.json else sys.stdout
    print(f"run {run.run_id} submitted as job {job_id}; its files are in {run.path}", file=messages)
    if args.wait:
        from hpcmoe.cli.wait import follow

        return follow(run, as_json=args.json)
    print(f"follow it:  hpcmoe logs {run.run_id} -f     hpcmoe status {run.run_id}", file=messages)
    if args.json:
        print(json.dumps({"run_id": run.run_id, "job_id": job_id, "run_dir": str(run.path)}, indent=2))
    return 0


def preview(config: Config, as_json: bool) -> None:
    """What would be submitted: the job script and the resolved config."""
    script = job_script(config)
    if as_json:
        print(json.dumps({"script": script, "config": to_plain(config)}, indent=2))
    else:
        print(f"# --- job script ---\n{script.rstrip()}\n\n# --- config.yaml ---\n{to_yaml(config).rstrip()}")


def job_script(config: Config) -> str:
    """The job script of a run that does not exist; RUN stands for its id."""
    from hpcmoe.runs.jobspec import job_spec, render
    from hpcmoe.runs.registry import runs_root
    from hpcmoe.runs.rundir import RunDir

    return render(job_spec(RunDir(runs_root() / "RUN"), config))
