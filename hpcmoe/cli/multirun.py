"""`hpcmoe submit -m`: Hydra's sweeper makes the points, our launcher makes them runs; this reports what became of them.

Not a verb of its own (`hpcmoe sweep` is). The launcher is hydra_plugins.hpcmoe_launchers; sweepers are the user's choice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcmoe.config.compose import opened_hydra
from hpcmoe.config.freeze import to_plain
from hpcmoe.errors import UserError
from hpcmoe.runs.jobspec import JobSpec, render
from hpcmoe.runs.registry import new_run_id, runs_root
from hpcmoe.runs.sweep import SweepDir, find_sweep
from hpcmoe.runs.sweep_plan import forecast, plan_json, plan_text
from hpcmoe.text import many, number_ranges

if TYPE_CHECKING:
    from hpcmoe.config.schema import Config
    from hydra_plugins.hpcmoe_launchers._points import Preview

SWEEP_DIR = "hydra.sweep.dir"
MOST_LINES = 20


@dataclass(frozen=True)
class SweptPoint:
    """One point of a sweep and what the launcher made of it: a submitted run's facts, or in a dry run a Preview."""

    overrides: list[str]
    value: Any


def submit_sweep(args: argparse.Namespace) -> int:
    """Submit, or with --dry-run only show, every point of the sweep."""
    if args.dry_run:
        with tempfile.TemporaryDirectory(prefix="hpcmoe-dry-run-") as nowhere:
            points = _sweep(args, Path(nowhere), dry_run=True)
        _preview([point.value for point in points], args.json)
        return 0
    with _sweep_dir(args.overrides, args.sweep) as directory:
        points = _sweep(args, directory)
    # Hydra has resolved what was typed as hydra.sweep.dir
    real = next((Path(point.value["sweep_dir"]) for point in points), directory)
    return _report(real, points, args)


def _sweep(args: argparse.Namespace, directory: Path, dry_run: bool = False) -> list[SweptPoint]:
    own = [_override(SWEEP_DIR, str(directory))] if dry_run or not _given(args.overrides) else []
    if dry_run:
        own.append("hydra.launcher.dry_run=true")
    if args.sweep is not None:
        own.append(_override("hydra.launcher.sweep", str(find_sweep(args.sweep).path)))
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
def _sweep_dir(overrides: Sequence[str], word: str | None) -> Iterator[Path]:
    """The sweep's directory, which is Hydra's too; a sweep that has no points leaves nothing. ``word``: a sweep that is there."""
    given = _given(overrides)
    if word is not None and given:
        raise UserError(f"--sweep {word} and {SWEEP_DIR}={given} do not go together: both say which sweep this is")
    sweeps = runs_root() / "sweeps"
    if word is not None:
        directory = find_sweep(word).path
    else:
        directory = Path(given).absolute() if given else sweeps / new_run_id(sweeps)
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        yield directory
    except BaseException:
        if directory in new and not SweepDir(directory).read_points():
            shutil.rmtree(directory, ignore_errors=True)
            for path in new[1:]:
                if path.exists() and not any(path.iterdir()):
                    path.rmdir()
        raise


def _preview(points: Sequence[Preview], as_json: bool) -> None:
    """What would be submitted: the table of points, and one job script for each array shape."""
    planned = [point.planned for point in points]
    shapes: dict[str, list[Config]] = {}
    for point in points:
        if point.planned.same_as is None:
            shapes.setdefault(point.planned.shape, []).append(point.config)
    scripts = {shape: _script(configs) for shape, configs in shapes.items()}
    told = forecast(planned, points[0].at_once, points[0].most_elements)
    if as_json:
        document = plan_json(planned, told) | {"scripts": scripts}
        for facts, point in zip(document["points"], points, strict=True):
            facts["config"] = to_plain(point.config)
        print(json.dumps(document, indent=2))
        return
    print(plan_text(planned, told))
    for shape, script in scripts.items():
        of = number_ranges(point.index for point in planned if point.shape == shape and point.same_as is None)
        print(f"\n# --- job script of points {of} ---\n{script.rstrip()}")


def _script(alike: Sequence[Config]) -> str:
    """The job script of runs that do not exist, of one shape; RUN and SWEEP stand for their ids."""
    config, root = alike[0], runs_root()
    runs = (root / "RUN",) * (1 if config.cluster.scheduler == "local" else len(alike))
    name = config.slurm.job_name or ("hpcmoe-SWEEP" if len(runs) > 1 else "hpcmoe-RUN")
    return render(JobSpec(runs, config, sys.executable, name, "TOKEN", sweep_dir=root / "sweeps" / "SWEEP"))


def _report(directory: Path, points: list[SweptPoint], args: argparse.Namespace) -> int:
    messages = sys.stderr if args.json else sys.stdout
    sweep = SweepDir(directory)
    print(f"sweep {sweep.sweep_id}: {_counted(points)}; what they share is in {directory}", file=messages)
    for point in points[:MOST_LINES]:
        print(f"  run {point.value['run_id']}  {_job(point.value):<18} {' '.join(point.overrides)}", file=messages)
    if len(points) > MOST_LINES:
        print(f"  ... and {many(len(points) - MOST_LINES, 'more point')}", file=messages)
    document: dict[str, Any] = {
        "sweep_id": sweep.sweep_id,
        "sweep_dir": str(directory),
        "runs": [{**point.value, "overrides": point.overrides} for point in points],
    }
    if args.wait:
        from hpcmoe.cli.sweep import follow

        return follow(sweep, as_json=args.json)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        print(f"follow it:  hpcmoe sweep status {sweep.sweep_id}     hpcmoe sweep results {sweep.sweep_id}", file=messages)
    return 0


def _counted(points: Sequence[SweptPoint]) -> str:
    """How many points are submitted, wait for room, or are not run."""
    skipped = sum(bool(point.value.get("same_as")) for point in points)
    held = sum(point.value["job_id"] is None and not point.value.get("same_as") for point in points)
    words = [f"{many(len(points) - skipped - held, 'point')} submitted"]
    words += [f"{held} held back until there is room"] if held else []
    words += [f"{skipped} skipped"] if skipped else []
    return ", ".join(words)


def _job(value: dict[str, Any]) -> str:
    if value.get("same_as"):
        return "finished already" if value["finished"] else "in it already"
    return f"job {value['job_id']}" if value["job_id"] else "held back"
