"""What `submit` asks before a job enters the queue: can this run, in which queue, and what is to be expected.

Takes the config as it stands (nothing is searched); raises UserError for what cannot run. Torch-free.
"""

from __future__ import annotations

from hpcmoe.config.schema import Config
from hpcmoe.errors import UserError
from hpcmoe.planner.plan import Plan, make
from hpcmoe.planner.search import Pins


def pins_of(config: Config) -> Pins:
    """The config's layout, every size of it."""
    layout = config.layout
    return Pins(
        pp=layout.pp,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        tp=layout.tp,
        ep=layout.ep,
        ep_placement=layout.ep_placement,
        schedule=layout.schedule if layout.pp > 1 else None,
        microbatch=layout.microbatch,
        recompute=layout.recompute,
    )


def check(config: Config) -> Plan:
    """The plan of a validated config. Raises UserError: the site's rule, or "impossible: memory ..." with the numbers."""
    plan = make(config, pins_of(config))
    if not plan.fits:
        raise UserError(f"impossible: {plan.impossible[0]}; `hpcmoe plan` shows a layout that fits")
    return plan


def fill_queue(config: Config, plan: Plan) -> None:
    """Write the chosen partition and QOS into a config that names none; Slurm's own default is left unsaid."""
    slurm, rules = config.slurm, config.cluster.qos
    rule = rules.get(plan.queue.qos or "")
    if slurm.qos is None and plan.queue.qos is not None and not (rule and rule.default):
        slurm.qos = plan.queue.qos
    if slurm.partition is None:
        slurm.partition = plan.queue.partition
    if slurm.time is None:
        slurm.time = plan.queue.time


def prepare(config: Config) -> Plan:
    """Refuse what cannot run, and write the plan's queue into ``config``. Every way of submitting comes through here."""
    plan = check(config)
    fill_queue(config, plan)
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
