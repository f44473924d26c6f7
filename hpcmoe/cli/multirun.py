"""`hpcmoe submit -m`: Hydra's sweeper makes the points, our launcher makes them runs; this reports what became of them.

Not a verb of its own. The launcher is hydra_plugins.hpcmoe_launchers; sweepers are the user's choice (hydra/sweeper=...).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcmoe.config.compose import opened_hydra
from hpcmoe.errors import UserError
from hpcmoe.runs.registry import new_run_id, runs_root
from hpcmoe.runs.rundir import RunDir

SWEEP_DIR = "hydra.sweep.dir"


@dataclass(frozen=True)
class SweptPoint:
    """One point of a sweep and what the launcher made of it: a submitted run's facts, or in a dry run its Config."""

    overrides: list[str]
    value: Any


def submit_sweep(args: argparse.Namespace) -> int:
    """Submit, or with --dry-run only show, every point of the sweep."""
    if args.dry_run:
        from hpcmoe.cli.submit import preview

        with tempfile.TemporaryDirectory(prefix="hpcmoe-dry-run-") as nowhere:
            points = _sweep(args, Path(nowhere), dry_run=True)
        preview({" ".join(point.overrides): point.value for point in points}, args.json)
        return 0
    with _sweep_dir(args.overrides) as directory:
        points = _sweep(args, directory)
    return _report(directory, points, args)


def _sweep(args: argparse.Namespace, directory: Path, dry_run: bool = False) -> list[SweptPoint]:
    own = [_override(SWEEP_DIR, str(directory))] if dry_run or not _given(args.overrides) else []
    if dry_run:
        own.append("hydra.launcher.dry_run=true")
    if args.yes:
        own.append("hydra.launcher.yes=true")
    with opened_hydra(args.config_dir, args.config_path) as hydra:
        returned = hydra.multirun(args.config_name, _not_here, [*args.overrides, *own], with_log_configuration=False)
    return list(_points(returned))


def _not_here(_: object) -> None:
    """Hydra's task function. Only a launcher that would run the training inside this very process calls it."""
    raise UserError("a sweep of hpcmoe is submitted by hydra/launcher=hpcmoe, the default; other launchers do not know its runs")


def _points(returned: Any) -> Iterator[SweptPoint]:
    """The launcher's answers in what a sweeper returns: lists of JobReturn, however deep (Hydra's basic sweeper: one a batch)."""
    if isinstance(returned, Sequence):
        for inner in returned:
            yield from _points(inner)
    elif hasattr(returned, "return_value"):
        yield SweptPoint(list(returned.overrides or []), returned.return_value)


def _override(key: str, text: str) -> str:
    """``key=text`` in Hydra's grammar, whatever ``text`` holds."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return f"{key}={QuotedString(text, Quote.single).with_quotes()}"


def _given(overrides: Sequence[str]) -> str | None:
    """The user's own sweep directory."""
    return next((text.partition("=")[2] for text in reversed(overrides) if text.lstrip("+").startswith(f"{SWEEP_DIR}=")), None)


@contextmanager
def _sweep_dir(overrides: Sequence[str]) -> Iterator[Path]:
    """Where the sweep's script, its list of runs and Hydra's multirun.yaml go; a sweep that starts no run leaves nothing."""
    given = _given(overrides)
    sweeps = runs_root() / "sweeps"
    directory = Path(given).absolute() if given else sweeps / new_run_id(sweeps)
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        yield directory
    except BaseException:
        if not (directory / "points.jsonl").exists() and directory in new:
            shutil.rmtree(directory, ignore_errors=True)
            for path in new[1:]:
                if path.exists() and not any(path.iterdir()):
                    path.rmdir()
        raise


def _report(directory: Path, points: list[SweptPoint], args: argparse.Namespace) -> int:
    messages = sys.stderr if args.json else sys.stdout
    print(f"sweep {directory.name}: {len(points)} runs submitted; what they share is in {directory}", file=messages)
    for point in points:
        print(f"  run {point.value['run_id']}  job {point.value['job_id']:<12} {' '.join(point.overrides)}", file=messages)
    document: dict[str, Any] = {
        "sweep_id": directory.name,
        "sweep_dir": str(directory),
        "runs": [{**point.value, "overrides": point.overrides} for point in points],
    }
    status = _wait(document, messages) if args.wait else 0
    if args.json:
        print(json.dumps(document, indent=2))
    elif not args.wait:
        print("follow them:  hpcmoe status     hpcmoe logs RUN -f", file=messages)
    return status


def _wait(document: dict[str, Any], messages: Any) -> int:
    """See all runs to their ends, whichever comes first; the exit code of the one that needs a person most."""
    from hpcmoe.cli.wait import INTERRUPTED
    from hpcmoe.runs.supervise import supervise_all, worst_exit_code

    runs = [RunDir(Path(facts["run_dir"])) for facts in document["runs"]]
    try:
        views = supervise_all(runs, lambda line: print(line, file=messages, flush=True))
    except KeyboardInterrupt:
        print("\nthe runs go on; `hpcmoe wait RUN` follows one of them again, `hpcmoe cancel RUN` ends it", file=sys.stderr)
        return INTERRUPTED
    for facts, view in zip(document["runs"], views, strict=True):
        facts.update(view.as_json(time.time()))
    return worst_exit_code(views)
