"""What `hpcmoe sweep` says of sweeps: text and plain values. Where the points stand is hpcmoe.runs.results'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hpcmoe.cli.words import ago
from hpcmoe.runs.choose import texts_of
from hpcmoe.runs.results import PointResult, Results
from hpcmoe.runs.sweep_life import life_of, stop_reason
from hpcmoe.text import many, table

MOST_ROWS = 40
MOST_FAILURES = 20
# What a person should see first when not all can be shown.
BY_INTEREST = ("FAILED", "UNKNOWN", "STOPPED", "CANCELLED", "RUNNING", "QUEUED", "PLANNED", "HELD_BACK", "COMPLETED")


def summary(results: Results) -> dict[str, Any]:
    """The sweep as a whole, for --json."""
    sweep, life = results.sweep, life_of(results.sweep)
    return {
        "sweep_id": sweep.sweep_id,
        "sweep_dir": str(sweep.path),
        "created": sweep.facts.get("created"),
        "launcher": sweep.facts.get("launcher"),
        "throttle": life.throttle,
        "states": _counts(results.points),
        "gpu_hours": _gpu_hours(results.points),
        "stopped": stop_reason(life),
    }


def _counts(points: Iterable[PointResult]) -> dict[str, int]:
    counted = Counter(each.state for each in points)
    return {state: counted[state] for state in sorted(counted, key=_interest, reverse=True)}


def _interest(state: str) -> int:
    return BY_INTEREST.index(state) if state in BY_INTEREST else len(BY_INTEREST)


def _gpu_hours(points: Iterable[PointResult]) -> float:
    """What this sweep has used: a duplicate's run was paid for before."""
    return sum(each.glance.gpu_hours for each in points if each.glance is not None and each.seen.point.same_as is None)


def _states(points: Iterable[PointResult]) -> str:
    return ", ".join(f"{count} {state}" for state, count in _counts(points).items()) or "no points"


def overview(seen: Sequence[Results], now: float) -> str:
    """All sweeps, a line each."""
    if not seen:
        return "no sweeps; `hpcmoe submit -m` starts one"
    rows = [["SWEEP", "POINTS", "STATES", "GPU-HOURS", "STARTED"]]
    for one in seen:
        created = float(one.sweep.facts.get("created") or now)
        rows.append([one.sweep_id, str(len(one.points)), _states(one.points), f"{_gpu_hours(one.points):.2f}", ago(created, now)])
    return table(rows)


def status_text(results: Results, now: float, everything: bool = False) -> str:
    """The sweep, its points in a table, and what its failures said."""
    facts, life = results.sweep.facts, life_of(results.sweep)
    created = float(facts.get("created") or now)
    lines = [
        f"sweep {results.sweep_id}  {many(len(results.points), 'point')}, made {ago(created, now)}, in {results.sweep.path}",
        f"{_states(results.points)}; {_gpu_hours(results.points):.2f} GPU-hours"
        + (f"; at most {life.throttle} at once" if life.throttle is not None else ""),
    ]
    stopped = stop_reason(life)
    lines += [f"starts no more runs: {stopped}"] if stopped else []
    shown = results if everything else _most_interesting(results)
    lines += ["", _table(shown, ["STATE", "STEP", "LOSS", "GPU-HOURS", "ATTEMPTS", "JOB", "RUN", "REASON"], results.varying())]
    left = len(results.points) - len(shown.points)
    lines += [f"... and {many(left, 'more point')}; --all shows them"] if left else []
    return "\n".join([*lines, *failure_lines(results.points, None if everything else MOST_FAILURES)])


def _most_interesting(results: Results) -> Results:
    first = sorted(results.points, key=lambda each: _interest(each.state))[:MOST_ROWS]
    return Results(results.sweep, tuple(sorted(first, key=lambda each: each.index)))


def results_text(results: Results) -> str:
    """All points in a table, and what their failures said."""
    if not results.points:
        return "no point is left by the filters"
    heads = ["STATE", "STEP", *results.figure_columns, "TOKENS/S", "GPU-HOURS", "RUN"]
    return "\n".join([_table(results, heads, results.varying()), *failure_lines(results.points, MOST_FAILURES)])


def _table(results: Results, heads: Sequence[str], settings: Sequence[str]) -> str:
    rows = [["POINT", *settings, *heads]]
    for each in results.points:
        texts = texts_of(each.seen.point.overrides)
        words = [texts.get(key.removeprefix("override."), "-") for key in settings]
        rows.append([str(each.index), *words, *(_cell(each, head) for head in heads)])
    return table(rows)


def _cell(each: PointResult, head: str) -> str:
    point, run = each.seen.point, each.glance
    if head in each.figures or head == "LOSS":
        return _number(each.figures.get(head.lower() if head == "LOSS" else head), ".4f")
    match head:
        case "STATE":
            return each.state
        case "RUN":
            return f"={point.same_as}" if point.same_as else point.result_run
        case "REASON":
            return (each.seen.reason or "")[:60]
        case "TOKENS/S":
            return _number(each.tokens_per_s, ",.0f")
    if run is None:
        return "-"
    match head:
        case "STEP":
            return "-" if run.step is None else f"{run.step}/{'?' if run.steps is None else run.steps}"
        case "GPU-HOURS":
            return f"{run.gpu_hours:.2f}"
        case "ATTEMPTS":
            return str(run.attempt_count)
        case "JOB":
            return run.job_id or "-"
    return "-"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form) if form != ".4f" or 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}"


def failure_lines(points: Iterable[PointResult], most: int | None) -> list[str]:
    """Of each point that FAILED the reason and the last line of the rank that failed."""
    failed = [each for each in points if each.state == "FAILED"]
    lines = []
    for each in failed[:most]:
        what = f"point {each.index} ({' '.join(each.seen.point.overrides)}), run {each.seen.point.result_run}"
        lines += ["", f"{what}, FAILED: {each.seen.reason}"]
        lines += [f"  {each.last_error}"] if each.last_error and each.last_error not in (each.seen.reason or "") else []
    if most is not None and len(failed) > most:
        lines += ["", f"... and {len(failed) - most} more that FAILED; --filter state=FAILED --format csv has all"]
    return lines
