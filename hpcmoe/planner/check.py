"""What `submit` asks before a job enters the queue: can this run, in which queue, and what is to be expected.

Takes the config as it stands (nothing is searched); raises UserError for what cannot run. Torch-free.
"""

from __future__ import annotations

import json

from hpcmoe.config.elastic import check_counts
from hpcmoe.config.freeze import to_plain
from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.planner import qos
from hpcmoe.planner.elastic import lay_out, pins_of
from hpcmoe.planner.plan import Plan, make
from hpcmoe.planner.qos import Queue


def check(config: Config) -> Plan:
    """The plan of a validated config. Raises UserError: the site's rule, or "impossible: memory ..." with the numbers."""
    plan = make(config, pins_of(config))
    if not plan.fits:
        raise UserError(f"impossible: {plan.impossible[0]}; `hpcmoe plan` shows a layout that fits")
    return plan


def fill_queue(config: Config, queue: Queue) -> None:
    """Write the chosen partition and QOS into a config that names none; Slurm's own default is left unsaid."""
    slurm, rules = config.slurm, config.cluster.qos
    rule = rules.get(queue.qos or "")
    if slurm.qos is None and queue.qos is not None and not (rule and rule.default):
        slurm.qos = queue.qos
    if slurm.partition is None:
        slurm.partition = queue.partition
    if slurm.time is None:
        slurm.time = queue.time


def prepare(config: Config) -> Plan | None:
    """Refuse what cannot run, and write the plan's queue into ``config``. Every way of submitting comes through here.

    Of an elastic run: the plan for the most nodes, after every number of nodes was found to make one that fits, in that queue.
    None for a command: of it only the queue is known.
    """
    if config.runs_command:
        fill_queue(config, qos.choose(config.cluster, config.slurm, config.nodes))
        return None
    if config.elastic:
        return _prepare_range(config)
    plan = check(config)
    fill_queue(config, plan.queue)
    return plan


# What the planner does not look at: points of a sweep that differ in nothing else share a plan.
NOT_PLANNED = frozenset(
    {"name", "user", "env", "notify", "logging", "sweep", "data"}
    | {"train.seed", "train.deterministic"}
    | {f"optim.{name}" for name in ("lr", "betas", "eps", "weight_decay", "clip_norm", "schedule", "min_lr_ratio")}
    | {f"optim.{name}" for name in ("warmup_steps", "decay_steps")}
)


class ManyPlans:
    """``prepare`` for the points of a sweep: those that the planner cannot tell apart are planned once."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[float | None, tuple[str | None, ...]]] = {}

    def prepare(self, config: Config) -> float | None:
        """As ``prepare`` fills in and refuses; returns the plan's speed (tokens/s of one GPU), None where there is none."""
        seen = _planned_part(config)
        if seen not in self._made:
            plan, slurm = prepare(config), config.slurm
            self._made[seen] = (plan.tokens_per_s if plan is not None else None, (slurm.qos, slurm.partition, slurm.time))
        speed, (config.slurm.qos, config.slurm.partition, config.slurm.time) = self._made[seen]
        return speed


def _planned_part(config: Config) -> str:
    plain = to_plain(config)
    for key in NOT_PLANNED:
        group, _, name = key.partition(".")
        if not name:
            plain.pop(group, None)
        elif isinstance(plain.get(group), dict):
            plain[group].pop(name, None)
    return json.dumps(plain, sort_keys=True, default=str)


def _prepare_range(config: Config) -> Plan:
    plan = check(lay_out(config, config.nodes))
    fill_queue(config, plan.queue)
    check_counts(config, lambda attempt: qos.choose(config.cluster, config.slurm, attempt.nodes))
    check_counts(config, lambda attempt: lay_out(config, attempt.nodes))
    return plan


def summary(plan: Plan) -> str:
    """One line for a person: expected memory and speed."""
    memory = f"{plan.best.memory.total / 2**30:.2f} GiB a GPU"
    if plan.limit is not None:
        memory += f" of {plan.limit / 2**30:.0f}"
    speed = plan.tokens_per_s
    if speed is None or plan.mfu is None:
        return f"expected: {memory}; the speed of {plan.machine.name} is not on record"
    return f"expected: {memory}; {speed:,.0f} tokens/s/GPU, MFU {plan.mfu:.1%} (titan, of {plan.peak_tflops:g} TFLOP/s)"
