#!/usr/bin/env python3
"""A real Slurm on one machine, started in seconds: four nodes of four fake GPUs, with preemption and accounting.

    testbed.py up DIR [--user NAME] [--user-signal] [--install]      testbed.py status|env|down DIR
    testbed.py set DIR user_signal=on|off

For trying hpcmoe and for its tests; not for computing. Needs root and Debian's Slurm packages, but no systemd.
Exit code: 0 done (for status: runs), 1 failed (for status: does not run), 2 the machine or the command line is at fault.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs as a file, from anywhere

from tests.slurm import testbed_cluster
from tests.slurm.testbed_config import Settings
from tests.slurm.testbed_processes import TestbedError


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.verb(args))
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 2 if error.setup else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="testbed.py", description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.add_argument("root", metavar="DIR", type=lambda text: Path(text).absolute(), help="the testbed's folder")
        sub.set_defaults(verb=globals()[f"_{name}"])
        return sub

    up = verb("up", "start a testbed and wait until its nodes are idle")
    up.add_argument("--user", action="append", default=[], metavar="NAME", help="an existing user who may run jobs (repeatable)")
    up.add_argument("--user-signal", action="store_true", help="preemption sends a job the signal of its own --signal")
    up.add_argument("--install", action="store_true", help="install missing packages with apt-get first")
    verb("down", "stop it, with its jobs; logs stay in DIR/log")
    verb("status", "say what runs; exit 0 if all does, else 1")
    verb("env", "print what a shell must evaluate to use it")
    verb("set", "change a running testbed").add_argument("setting", choices=["user_signal=on", "user_signal=off"])
    return parser


def _up(args: argparse.Namespace) -> int:
    if testbed_cluster.report(args.root)[0]:
        print(f"a testbed is up already in {args.root}")
        return 0
    if args.install and os.geteuid() == 0 and (missing := testbed_cluster.missing_packages()):
        _install(missing)
    if testbed_cluster.down(args.root):
        print(f"stopped what was left of the testbed in {args.root}")
    began = time.monotonic()
    record = testbed_cluster.up(args.root, user_signal=args.user_signal, users=tuple(args.user))
    print(f"up in {time.monotonic() - began:.1f} s: nodes n0001 to n0004 are idle; to use it:\n\n{_exports(record.settings)}\n")
    return 0


def _install(packages: list[str]) -> None:
    command = testbed_cluster.install_command(packages)
    # Debian starts daemons as it installs them; the testbed wants none of these.
    print("+ " + shlex.join(command), flush=True)
    if subprocess.run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}).returncode:
        raise TestbedError(f"failed (is apt-get update needed first?): {shlex.join(command)}", setup=True)


def _down(args: argparse.Namespace) -> int:
    stopped = testbed_cluster.down(args.root)
    print(f"stopped the testbed in {args.root}" if stopped else f"no testbed ran in {args.root}")
    return 0


def _status(args: argparse.Namespace) -> int:
    good, text = testbed_cluster.report(args.root)
    print(text)
    return 0 if good else 1


def _env(args: argparse.Namespace) -> int:
    record = testbed_cluster.load(args.root)
    if record is None or not record.processes:
        raise TestbedError(f"no testbed runs in {args.root}")
    print(_exports(record.settings))
    return 0


def _exports(settings: Settings) -> str:
    return f"export SLURM_CONF={shlex.quote(str(settings.slurm_conf))}"


def _set(args: argparse.Namespace) -> int:
    on = args.setting == "user_signal=on"
    testbed_cluster.set_user_signal(args.root, on)
    print(args.setting)
    return 0


if __name__ == "__main__":
    sys.exit(main())
