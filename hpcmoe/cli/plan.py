"""`hpcmoe plan [OVERRIDES]`: which layout fits, how fast it will be, and why. Takes submit's overrides; writes nothing.

Never imports torch, except for --verify.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from hpcmoe.cli.words import Parser, add_json
from hpcmoe.config.compose import ROOT, load
from hpcmoe.errors import UserError

if TYPE_CHECKING:
    from hpcmoe.config.schema import Config
    from hpcmoe.planner.layout import Layout
    from hpcmoe.planner.plan import Plan
    from hpcmoe.planner.search import Pins

SEQ_LEN = 4096  # tokens, where the user names none
BATCH = 1024  # sequences a step, likewise, rounded up to a multiple of the GPUs
NOT_YET = "hpcmoe submit does not take this layout yet"
RANGE = re.compile(r"nodes=(\d+)\.\.(\d+)$")


def main(argv: list[str]) -> int:
    args = _parser().parse_intermixed_args(argv)
    spans = [m for m in map(RANGE.match, args.overrides) if m]
    if spans:
        return _range(args, int(spans[-1][1]), int(spans[-1][2]))
    config, notes = _config(args, args.overrides)
    plan = _plan(config, args.overrides, notes, args.target_mfu)
    if args.verify:
        return _verify(config, plan, args.json)
    if args.json:
        from hpcmoe.planner.plan import to_json

        print(json.dumps(to_json(plan), indent=2))
    else:
        from hpcmoe.planner.render import show

        show(plan, _console(), args.explain)
        if plan.fits:
            label = "submit line (not taken yet, see above)" if any(NOT_YET in text for text in plan.assumptions) else "run it"
            _console().print(f"\n[bold]{label}[/]  {_command(args.overrides, plan)}", highlight=False, soft_wrap=True)
    return 1 if plan.impossible else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hpcmoe plan",
        description="Choose a 4D layout for a model on a cluster, or check and cost a given one. "
        "Exit status: 0 possible, 1 impossible, 2 a mistake in the question.",
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as for submit; nodes=8..256 compares node counts")
    parser.add_argument("--explain", action="store_true", help="why this layout, what limits it, every assumption")
    parser.add_argument("--target-mfu", type=float, metavar="SHARE", help="say which limit forbids this MFU, such as 0.45")
    parser.add_argument(
        "--verify", action="store_true", help="build one rank with fake tensors and compare its bytes (needs torch)"
    )
    parser.add_argument("--config-dir", "-cd", help="a directory of your own configs")
    parser.add_argument("--config-name", "-cn", default=ROOT, help="the root config")
    add_json(parser)
    return parser


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140)


def _names(overrides: list[str]) -> set[str]:
    return {o.lstrip("+~").split("=", 1)[0] for o in overrides}


def _config(args: argparse.Namespace, overrides: list[str]) -> tuple[Config, list[str]]:
    """The composed config, with what a plan needs and the user did not say; and a note for each such choice."""
    from hpcmoe.config.precision import precision_of
    from hpcmoe.config.validate import check_numbers

    config = load(overrides, args.config_dir, args.config_name)
    if config.runs_command:
        raise UserError(
            "engine=command: nothing is known of its model and layout, so there is nothing to plan; submit it with nodes=N"
        )
    check_numbers(config)
    names, notes = _names(overrides), []
    if config.precision.name is None:
        config.precision.name = precision_of(config)
        notes.append(f"precision={config.precision.name.value}, since none was given")
    if config.cluster.device == "cuda":
        if "train.seq_len" not in names and "train" not in names:
            config.train.seq_len = min(SEQ_LEN, config.model.max_seq_len)
            notes.append(f"train.seq_len={config.train.seq_len}, since none was given")
        if "train.global_batch_tokens" not in names and "train" not in names:
            sequences = -(-BATCH // config.world_size) * config.world_size
            config.train.global_batch_tokens = config.train.seq_len * sequences
            notes.append(
                f"train.global_batch_tokens={config.train.global_batch_tokens} ({sequences} sequences), since none was given"
            )
    return config, notes


def _pins(config: Config, overrides: list[str]) -> Pins:
    """Layout fields that the user fixed: named in an override, or no longer at the default because of a config of theirs."""
    from hpcmoe.config.schema import LayoutConfig
    from hpcmoe.planner.search import Pins

    names, default = _names(overrides), LayoutConfig()
    given: dict[str, Any] = {}
    for name in Pins.__dataclass_fields__:
        value = getattr(config.layout, name)
        if value is not None and (f"layout.{name}" in names or value != getattr(default, name)):
            given[name] = value
    return Pins(**given)


def _plan(config: Config, overrides: list[str], notes: list[str], target_mfu: float | None = None) -> Plan:
    from dataclasses import replace

    from hpcmoe.planner.plan import make

    pins = _pins(config, overrides)
    plan = make(config, pins, target_mfu)
    said = list(notes)
    refusal = _refused_by_submit(config, plan.layout) if plan.fits else None
    if refusal is not None:
        said.append(f"{NOT_YET} ({refusal})" + _runs_today(config, pins))
    return replace(plan, assumptions=(*said, *plan.assumptions))


def _runs_today(config: Config, pins: Pins) -> str:
    """The best layout that submit takes now, in words; empty when the user asked for what it does not."""
    from dataclasses import replace

    from hpcmoe.planner.plan import best_candidate

    if pins.tp or pins.pp or pins.recompute:
        return ""
    for free in (replace(pins, tp=1, pp=1), replace(pins, tp=1, pp=1, recompute="none")):
        found = best_candidate(config, free)
        if found is None or found.tokens_per_s is None or _refused_by_submit(config, found.layout) is not None:
            continue
        if not found.fits:
            return f"; of what it takes now nothing fits ({found.memory.total / 2**30:.0f} GiB a GPU)"
        layout = found.layout
        return (
            f"; of what it takes now the best is {layout.describe()}, microbatch {layout.microbatch}, "
            f"recompute {layout.recompute}: {found.tokens_per_s:,.0f} tokens/s/GPU"
        )
    return ""


def _refused_by_submit(config: Config, layout: Layout) -> str | None:
    """What submit and the engine say to this layout today; None when they take it."""
    import copy

    from hpcmoe.config.validate import validate
    from hpcmoe.engine.support import check_engine

    trial = copy.deepcopy(config)
    trial.slurm.account = trial.slurm.account or "account"
    for name in ("pp", "dp_replicate", "dp_shard", "tp", "ep", "ep_placement", "schedule", "microbatch", "recompute"):
        setattr(trial.layout, name, getattr(layout, name))
    try:
        check_engine(validate(trial))
    except UserError as error:
        return str(error)
    return None


def _command(overrides: list[str], plan: Plan) -> str:
    """The submit line that runs this plan."""
    import shlex

    layout = plan.layout
    names = _names(overrides)
    sizes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "tp": layout.tp, "ep": layout.ep}
    words = {f"layout.{k}": str(v) for k, v in sizes.items()}
    if layout.ep_placement != "inside":
        words["layout.ep_placement"] = layout.ep_placement
    words |= {"layout.microbatch": str(layout.microbatch), "layout.recompute": layout.recompute}
    if layout.pp > 1:
        words["layout.schedule"] = layout.schedule
    words["train.seq_len"] = str(plan.work.seq)
    words["train.global_batch_tokens"] = str(plan.work.seq * plan.work.batch)
    if plan.queue.qos:
        words["slurm.qos"] = plan.queue.qos
    added = [f"{name}={value}" for name, value in words.items() if name not in names]
    return "hpcmoe submit " + " ".join(shlex.quote(word) for word in [*overrides, *added])


def _range(args: argparse.Namespace, low: int, high: int) -> int:
    """Node counts from ``low`` to ``high``, doubling: which one is worth it."""
    from hpcmoe.planner.plan import to_json

    if not 0 < low <= high:
        raise UserError(f"nodes={low}..{high}: write nodes=LOW..HIGH with 0 < LOW <= HIGH")
    rest = [o for o in args.overrides if not RANGE.match(o)]
    counts = []
    while low < high:
        counts.append(low)
        low *= 2
    results: list[Plan | tuple[int, str]] = []
    for nodes in [*counts, high]:
        overrides = [*rest, f"nodes={nodes}"]
        config, notes = _config(args, overrides)
        try:
            results.append(_plan(config, overrides, notes, args.target_mfu))
        except UserError as error:
            results.append((nodes, str(error)))
    if args.json:
        documents = [
            {"nodes": r[0], "fits": False, "impossible": [r[1]]} if isinstance(r, tuple) else to_json(r) for r in results
        ]
        print(json.dumps({"plans": documents}, indent=2))
    else:
        from hpcmoe.planner.render import range_table

        _console().print(range_table(results), soft_wrap=True)
    return 0 if any(not isinstance(r, tuple) and r.fits for r in results) else 1


def _verify(config: Config, plan: Plan, as_json: bool) -> int:
    from hpcmoe.planner.verify import report, verify

    result = verify(config, plan)
    print(json.dumps(result.as_json(), indent=2) if as_json else report(result))
    return 0 if result.agrees else 1
