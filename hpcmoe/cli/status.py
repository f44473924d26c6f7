"""`hpcmoe status [RUN]`: all runs in a table, or one run's story. Never imports torch or Hydra."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from hpcmoe.cli.saved import certificate_text, goodput_line, save_lines
from hpcmoe.cli.words import Parser, add_json, add_run, ago
from hpcmoe.errors import UserError
from hpcmoe.runs.glance import Glance, Glancer, created_at, glance
from hpcmoe.runs.journal import Event
from hpcmoe.runs.nodes import STRAGGLER
from hpcmoe.runs.observe import RunView, observe
from hpcmoe.runs.registry import find_run, run_dirs, runs_root
from hpcmoe.runs.saves import certificates_of, saves_of
from hpcmoe.runs.store import read_record
from hpcmoe.runs.story import Attempt, goodput_of
from hpcmoe.text import duration, table


def main(argv: list[str]) -> int:
    parser = Parser(prog="hpcmoe status", description="Show all runs, or the story of one.")
    add_run(parser, required=False)
    parser.add_argument(
        "--certify", action="store_true", help="show from what each resume continued, and whether its losses are bit-identical"
    )
    add_json(parser)
    args = parser.parse_args(argv)
    if args.certify and args.run is None:
        parser.error("--certify needs a RUN")
    now = time.time()
    if args.run is None:
        root = runs_root()
        records = sorted(Glancer(root).read_all(run_dirs(root)), key=lambda record: (created_at(record), record.run.run_id))
        glances = [glance(view, now) for view in observe(records, now)]
        print(json.dumps({"runs": [asdict(run) for run in glances]}, indent=2) if args.json else overview(glances, now))
        return 0
    view = observe([read_record(find_run(args.run))], now)[0]
    if args.certify and view.record.planned.get("engine") == "command":
        raise UserError(
            f"run {view.record.run.run_id} trains with a command: how it resumes is its own business, and not certified"
        )
    certificates = certificates_of(view.record.events) if args.certify else []
    if args.json:
        record = view.record
        facts = view.as_json(now) | {"saves": saves_of(record.events).as_json()}
        facts["goodput"] = goodput_of(record.attempts, record.metrics, now).as_json()
        if args.certify:
            facts["certificates"] = [one.as_json() for one in certificates]
        print(json.dumps(facts, indent=2))
    else:
        print(certificate_text(certificates) if args.certify else story(view, now))
    return 1 if any(one.verdict == "differs" for one in certificates) else 0


def overview(glances: list[Glance], now: float) -> str:
    if not glances:
        return f"no runs in {runs_root()}"
    rows = [["RUN", "NAME", "STATE", "STEP", "LOSS", "JOB", "ATTEMPTS", "GPU-HOURS", "STARTED", "REASON"]]
    for run in glances:
        rows.append(
            [
                run.run_id,
                run.name,
                run.state,
                "-" if run.step is None else f"{run.step}/{'?' if run.steps is None else run.steps}",
                "-" if run.loss is None else f"{run.loss:.4f}",
                run.job_id or "-",
                str(run.attempt_count),
                f"{run.gpu_hours:.2f}",
                ago(run.created, now),
                (run.reason or "")[:60],
            ]
        )
    return table(rows)


def story(view: RunView, now: float) -> str:
    facts, planned = view.as_json(now), view.record.planned
    kind = "GPUs" if planned.get("engine") == "command" else "ranks"
    lines = [
        f"run {facts['run_id']}  {facts['name']} on {planned.get('cluster')}, "
        f"{nodes_of(planned)} x {planned.get('gpus_per_node')} {kind}  in {facts['run_dir']}",
        f"{view.state}" + (f": {view.reason}" if view.reason else "") + f"  (job {facts['job_id']})",
    ]
    if view.state == "UNKNOWN" and view.unknown_since:
        lines.append(f"unknown since {ago(view.unknown_since, now)}; last known: {view.last_known}")
    lines.append(progress(view))
    lines += save_lines(saves_of(view.record.events), now)
    attempts = view.record.attempts
    if attempts:
        rows = [["ATTEMPT", "STARTED", "HELD", "NODES", "STEPS", "ENDED BY", "LOST", "SAVE", "RESTART", "GPU-HOURS"]]
        rows += [attempt_row(attempt, now) for attempt in attempts]
        lines += ["", table(rows)]
        details = [f"  {attempt.attempt}: {attempt.detail}" for attempt in attempts if attempt.detail]
        lines += details
        lines += node_lines(view.record.events)
        lines += ["", *startups] if (startups := [startup_line(attempt) for attempt in attempts if attempt.startup]) else []
    lines += ["", *said] if (said := last_lines(view)) else []
    lost = "unknown" if planned.get("engine") == "command" else steps_lost(attempts)
    lines += ["", f"{facts['gpu_hours']:.3f} GPU-hours over {len(attempts)} attempts, {lost} steps lost"]
    goodput = goodput_line(goodput_of(attempts, view.record.metrics, now))
    lines += [goodput] if goodput else []
    return "\n".join(lines)


def last_lines(view: RunView) -> list[str]:
    """Of a run that FAILED: the end of the failing rank's log."""
    return [f"  {line}" for line in (view.record.finished or {}).get("last_lines") or []]


def progress(view: RunView) -> str:
    metrics = view.record.metrics
    if view.record.planned.get("engine") == "command":
        return command_progress(view)
    if not metrics:
        return f"no step yet, of {view.record.planned.get('steps')}"
    last = metrics[-1]
    mfu = last.get("mfu")
    mfu_text = (
        f", MFU {100 * mfu:.1f} % ({last.get('flops_convention')}, peak {last.get('peak_tflops'):.3g} TFLOP/s)" if mfu else ""
    )
    loss = "not finite" if last["loss"] is None else f"{last['loss']:.4f}"
    evaluated = next((line for line in reversed(metrics) if line.get("eval_loss") is not None), None)
    held_out = f", held out {evaluated['eval_loss']:.4f} after step {evaluated['eval_step']}" if evaluated else ""
    skipped = f", {last['skipped_steps']} steps skipped" if last.get("skipped_steps") else ""
    return (
        f"step {last['step']} of {view.record.planned.get('steps')}: loss {loss}{held_out}, "
        f"{last.get('tokens_per_s', 0.0):.0f} tokens/s{mfu_text}{skipped}"
    )


def command_progress(view: RunView) -> str:
    """What is seen of a command from outside."""
    record, last = view.record, view.record.last_line
    if not record.steps_seen:
        words = "steps unknown: no engine.progress says how to read them from its log"
    elif last is None:
        words = "no step yet"
    else:
        figures = [f"{words} {last[name]:g}" for name, words in (("loss", "loss"), ("tokens_per_s", "tokens/s")) if name in last]
        words = ": ".join([f"step {last['step']}", *([", ".join(figures)] if figures else [])])
    saved = next((event for event in reversed(record.events) if event["event"] == "progressed" and event.get("checkpoint")), None)
    return words if saved is None else f"{words}; newest checkpoint seen: {saved['checkpoint']}"


def startup_line(attempt: Attempt) -> str:
    """Where the time went between the job script's arrival and the end of the first step."""
    parts = ", ".join(f"{part.replace('_', ' ')} {seconds:.1f}" for part, seconds in attempt.startup.items())
    return f"  {attempt.attempt}: {sum(attempt.startup.values()):.1f} s to its first step ({parts})"


def nodes_of(planned: Event) -> str:
    """How many nodes the run asks for: ``4``, or of an elastic run ``2..4``."""
    fewest = planned.get("min_nodes")
    return f"{fewest}..{planned.get('nodes')}" if fewest else str(planned.get("nodes"))


def node_lines(events: list[Event]) -> list[str]:
    """The layouts of an elastic run's attempts, where they change, and the nodes that are slow or that Slurm was
    asked to leave out.
    """
    lines = []
    for event in events:
        if event["event"] == "laid_out" and event["nodes"] != event.get("nodes_before"):
            untold = (None, 1, "none", "inside", *(["1F1B"] if event["layout"].get("pp") == 1 else []))
            sizes = ", ".join(f"{name} {size}" for name, size in event["layout"].items() if size not in untold)
            lines.append(f"  {event['attempt']}: laid out on {event['nodes']} node{'s' * (event['nodes'] > 1)}: {sizes}")
        elif event["event"] == "nodes_excluded":
            away = f"is to stay away from {','.join(event['nodes'])}" if event["nodes"] else "may start on every node again"
            lines.append(f"  {event['attempt']}: job {event['job_id']} {away}")
        elif event["event"] == "nodes_left_out":
            lines.append(f"  {event['attempt']}: after the preflight no ranks on {','.join(event['nodes'])}")
        elif event["event"] == STRAGGLER:
            slow = f"rank {event['rank']} on {event['node']} computes {event['times']:g} times as long as the others"
            lines.append(f"  {event['attempt']}: STRAGGLER after step {event['step']}: {slow}")
    return lines


def steps_lost(attempts: Sequence[Attempt]) -> str:
    """Their sum; ``>=`` it where a rank was killed that could not write down its last steps."""
    at_least = ">=" if any(attempt.steps_unwritten for attempt in attempts) else ""
    return at_least + str(sum(attempt.steps_lost or 0 for attempt in attempts))


def attempt_row(attempt: Attempt, now: float) -> list[str]:
    end = attempt.ended if attempt.ended is not None else now
    steps = "-" if attempt.first_step is None else f"{attempt.first_step}..{attempt.last_step}"
    return [
        attempt.attempt,
        time.strftime("%m-%d %H:%M:%S", time.localtime(attempt.started)),
        ("~" if attempt.end_estimated else "") + duration(end - attempt.started),
        str(attempt.nodes),
        steps,
        attempt.cause or "(runs)",
        "-" if attempt.steps_lost is None else steps_lost([attempt]),
        "-" if attempt.save_s is None else f"{attempt.save_s:.1f}s",
        "-" if attempt.restart_s is None else duration(attempt.restart_s),
        f"{attempt.gpu_hours(now):.3f}",
    ]
