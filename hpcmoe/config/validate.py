"""What types cannot say: sizes that must divide, numbers within limits, words out of a list. Fills in what was left to us.

Not for what a cluster's site allows or whether a model fits: that is the planner's. Pure: looks at nothing but the config.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcmoe.config.choices import CHOICES, NOTIFY_EVENTS, POSITIVE, ZERO_OR_MORE
from hpcmoe.config.command import check_command, no_command
from hpcmoe.config.elastic import check_counts
from hpcmoe.config.halving import check_halving
from hpcmoe.config.precision import precision_of
from hpcmoe.config.schema import OWN_SECTIONS, Config, Precision, TrainConfig
from hpcmoe.config.slurm_words import check_slurm_words
from hpcmoe.errors import UserError, unknown_name
from hpcmoe.models.partition import schedule_violation

MOST_PROFILED_STEPS = 20
MICROBATCH_TOKENS = 8192  # per rank: enough to fill matmuls, small enough for activations of models that fit at all


def validate(config: Config) -> Config:
    """A copy of ``config`` that can run, with layout.dp_shard, layout.ep, layout.microbatch and precision.name filled in.

    Of an elastic run the layout stays open: each attempt has one of its own, and all that it may get are checked.
    Raises UserError that names the key, its value and what would be right, for the first thing that cannot be.
    """
    config = copy.deepcopy(config)
    if config.runs_command:
        for check in (check_command, _names, check_numbers, _cluster, _slurm, _notify, check_halving):
            check(config)
        return config
    for check in (no_command, _names, check_numbers, _model, _cluster, _precision, _data, _schedule, _features, _slurm, _notify):
        check(config)
    if config.elastic:
        check_counts(config, validate)
        return config
    _resolve_layout(config)
    _resolve_batch(config)
    from hpcmoe.engine.support import check_engine  # torch-free; what this version's engine has no code for

    check_engine(config)
    return config


def value_at(config: Config, key: str) -> object:
    """The value of a dotted key; None below something that is null."""
    value: object = config
    for name in key.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value


def _names(config: Config) -> None:
    for key, valid in CHOICES.items():
        if not _counts(config, key):
            continue
        value = value_at(config, key)
        if value is not None and str(value) not in valid:
            raise UserError(unknown_name(key, str(value), valid))


def _counts(config: Config, key: str) -> bool:
    return not (config.runs_command and key.partition(".")[0] in OWN_SECTIONS)


def check_numbers(config: Config) -> None:
    """Raises UserError for the first number that is out of its range."""
    tables: list[tuple[tuple[str, ...], str, Callable[[float], bool]]] = [
        (POSITIVE, "above zero", lambda number: number > 0),
        (ZERO_OR_MORE, "zero or more", lambda number: number >= 0),
    ]
    for keys, words, holds in tables:
        for key in keys:
            if not _counts(config, key):
                continue
            value = value_at(config, key)
            if value is None:
                continue
            assert isinstance(value, (int, float)), key
            if not (math.isfinite(value) and holds(value)):
                raise UserError(f"{key}={value} must be {words}")
    if config.runs_command:
        return
    betas = config.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"optim.betas={betas} must be two numbers from 0 up to, not including, 1, such as [0.9,0.95]")
    if config.optim.min_lr_ratio > 1:
        raise UserError(f"optim.min_lr_ratio={config.optim.min_lr_ratio} must be at most 1: it is a part of optim.lr")


def _model(config: Config) -> None:
    model = config.model
    if model.heads % model.kv_heads:
        raise UserError(
            f"model.kv_heads={model.kv_heads} must divide model.heads={model.heads}; {_near(model.kv_heads, model.heads)}"
        )
    if model.head_dim % 2:
        raise UserError(f"model.head_dim={model.head_dim} must be even: rotary embeddings turn pairs of it")
    if model.top_k > model.experts:
        raise UserError(f"model.top_k={model.top_k} must be at most model.experts={model.experts}")
    if model.experts % model.groups:
        raise UserError(f"model.groups={model.groups} must divide model.experts={model.experts}")
    if model.top_groups > model.groups:
        raise UserError(f"model.top_groups={model.top_groups} must be at most model.groups={model.groups}")
    if model.top_k > model.experts // model.groups * model.top_groups:
        raise UserError(
            f"model.top_k={model.top_k} experts are not to be found in model.top_groups={model.top_groups} groups "
            f"of {model.experts // model.groups}; raise top_groups"
        )
    if model.first_dense_layers > model.layers:
        raise UserError(f"model.first_dense_layers={model.first_dense_layers} must be at most model.layers={model.layers}")
    if model.first_dense_layers and not model.ffn:
        raise UserError(f"model.first_dense_layers={model.first_dense_layers} needs model.ffn, the width of a dense layer")
    if config.train.seq_len > model.max_seq_len:
        raise UserError(f"train.seq_len={config.train.seq_len} must be at most model.max_seq_len={model.max_seq_len}")


def _cluster(config: Config) -> None:
    cluster = config.cluster
    if cluster.scheduler == "local" and config.nodes != 1:
        raise UserError(
            f"nodes={config.nodes}: cluster={cluster.name} is this machine alone; set nodes=1, or choose a Slurm cluster"
        )
    if config.min_nodes is not None and config.min_nodes >= config.nodes:
        if config.min_nodes > config.nodes:
            raise UserError(f"min_nodes={config.min_nodes} must be below nodes={config.nodes}, the most")
        config.min_nodes = None
    if cluster.nodes is not None and config.nodes + config.spare_nodes > cluster.nodes:
        spare = f" and spare_nodes={config.spare_nodes}" if config.spare_nodes else ""
        raise UserError(f"nodes={config.nodes}{spare}: {cluster.name} has {cluster.nodes}")
    if config.spare_nodes and not config.resilience.preflight:
        raise UserError(
            f"spare_nodes={config.spare_nodes} needs resilience.preflight=true: only the preflight says which node to leave out"
        )
    if config.resilience.preflight and cluster.scheduler == "local":
        raise UserError(
            f"resilience.preflight=true: cluster={cluster.name} is this machine alone; it is for the nodes of a Slurm job"
        )
    if cluster.account_required and not config.slurm.account:
        raise UserError(f"{cluster.name} counts every job against a budget: set slurm.account=NAME")


def _precision(config: Config) -> None:
    config.precision.name = precision_of(config)
    gpu = config.cluster.gpu
    if config.precision.name is Precision.fp8 and gpu.peak_tflops.get("fp8") is None:
        raise UserError(f"precision=fp8: {gpu.model} ({config.cluster.name}) has no FP8 units; use precision=bf16")


def _data(config: Config) -> None:
    data = config.data
    if data.source == "text":
        if not data.path:
            raise UserError("data=text needs data.path, a file or a directory of text")
        data.path = str(Path(data.path).expanduser().absolute())


def _schedule(config: Config) -> None:
    steps, optim = config.train.steps, config.optim
    if optim.schedule == "wsd" and optim.decay_steps and optim.warmup_steps + optim.decay_steps > steps:
        raise UserError(
            f"optim.warmup_steps={optim.warmup_steps} and optim.decay_steps={optim.decay_steps} are more than train.steps={steps}"
        )


def _features(config: Config) -> None:
    warmup, whole = config.train.batch_warmup, config.train.global_batch_tokens
    if warmup.start_tokens is not None:
        where = f"train.batch_warmup.start_tokens={warmup.start_tokens}"
        if warmup.start_tokens >= whole:
            raise UserError(f"{where} must be below train.global_batch_tokens={whole}, to which the batch grows")
        if not warmup.tokens:
            raise UserError(f"{where} needs train.batch_warmup.tokens: how many tokens are trained on before the batch is whole")
        stair = warmup.increment_tokens or warmup.start_tokens
        if (whole - warmup.start_tokens) % stair:
            raise UserError(
                f"train.batch_warmup.increment_tokens={stair} (null: start_tokens) must divide "
                f"train.global_batch_tokens - start_tokens = {whole - warmup.start_tokens}"
            )
    profiler = config.logging.profiler
    if profiler.steps > MOST_PROFILED_STEPS:
        raise UserError(f"logging.profiler.steps={profiler.steps} must be at most {MOST_PROFILED_STEPS}: traces grow with each")
    if not profiler.ranks or not all(0 <= rank < config.world_size for rank in profiler.ranks):
        raise UserError(f"logging.profiler.ranks={profiler.ranks} must be ranks of this run, 0 to {config.world_size - 1}")
    check_halving(config)


def _slurm(config: Config) -> None:
    check_slurm_words(config.slurm)
    time, lead = config.slurm.time, config.resilience.stop_lead_s
    if lead != "auto" and (type(lead) is not int or lead <= 0):
        raise UserError(f"resilience.stop_lead_s={lead} must be a whole number of seconds above zero, or auto")
    if time is None:
        return
    from hpcmoe.slurm.parse import parse_duration

    try:
        seconds = parse_duration(time)
    except ValueError as error:
        forms = "minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S"
        raise UserError(f"slurm.time={time!r} is not a time of Slurm's; write {forms}, such as 24:00:00 or 4-00:00:00") from error
    if seconds is None:
        return
    if seconds <= 0:
        raise UserError(f"slurm.time={time} must be above zero")
    if lead != "auto" and seconds <= lead:
        raise UserError(
            f"resilience.stop_lead_s={lead} (seconds before the end at which the run saves and leaves) "
            f"must be below slurm.time={time} ({seconds:.0f} s)"
        )


def _notify(config: Config) -> None:
    notify = config.notify
    for event in notify.events:
        if event not in NOTIFY_EVENTS:
            raise UserError(unknown_name("event in notify.events", event, NOTIFY_EVENTS))
    if notify.webhook is not None and not re.match(r"https?://[^/\s]", notify.webhook):
        raise UserError(f"notify.webhook={notify.webhook!r} must be a URL that begins with https:// or http://")
    for address in [] if notify.mail is None else notify.mail.split(","):
        if not re.fullmatch(r"[^\s,;<>]+", address.strip()) or address.strip().startswith("-"):
            raise UserError(f"notify.mail={notify.mail!r} must be an address, or several with commas between")


def _resolve_layout(config: Config) -> None:
    layout, world = config.layout, config.world_size
    fixed = layout.pp * layout.dp_replicate * layout.tp
    sizes = f"pp={layout.pp} x dp_replicate={layout.dp_replicate} x tp={layout.tp}"
    where = f"nodes={config.nodes} x gpus_per_node={config.gpus_per_node} = {world} ranks"
    if layout.dp_shard is None:
        if world % fixed:
            raise UserError(f"layout: {sizes} = {fixed} must divide {where}")
        layout.dp_shard = world // fixed
    if fixed * layout.dp_shard != world:
        right = f"; layout.dp_shard={world // fixed} would be right" if world % fixed == 0 else ""
        raise UserError(f"layout: {sizes} x dp_shard={layout.dp_shard} = {fixed * layout.dp_shard} must be {where}{right}")
    spread, experts = layout.dp_shard * layout.tp, config.model.experts
    if layout.ep is None:
        layout.ep = max(size for size in _divisors(math.gcd(spread, experts)) if size <= config.gpus_per_node)
    layout.ep_placement = layout.ep_placement or "inside"
    if experts % layout.ep:
        raise UserError(
            f"layout.ep={layout.ep} must divide model.experts={experts}; {_near(layout.ep, math.gcd(spread, experts))}"
        )
    if spread % layout.ep:
        raise UserError(
            f"layout.ep={layout.ep} must divide dp_shard x tp = {spread} ranks; {_near(layout.ep, math.gcd(spread, experts))}"
        )


def _resolve_batch(config: Config) -> None:
    train, layout = config.train, config.layout
    assert layout.dp_shard is not None
    ranks = layout.dp_replicate * layout.dp_shard
    unit = train.seq_len * ranks
    if train.global_batch_tokens % unit:
        raise UserError(
            f"train.global_batch_tokens={train.global_batch_tokens} must be a multiple of train.seq_len={train.seq_len} "
            f"x {ranks} data-parallel ranks = {unit}; {_multiples(train.global_batch_tokens, unit)}"
        )
    sequences = train.global_batch_tokens // unit
    if train.batch_warmup.start_tokens is not None:
        sequences = _warmup_sequences(train, unit)
    if layout.microbatch is None:
        layout.microbatch = _microbatch(config, sequences)
    if sequences % layout.microbatch:
        raise UserError(
            f"layout.microbatch={layout.microbatch} must divide the {sequences} sequences a rank trains on per step; "
            f"{_near(layout.microbatch, sequences)}"
        )


def _microbatch(config: Config, sequences: int) -> int:
    """The largest that is small enough for memory and leaves the pipeline's schedule as many microbatches as it needs."""
    layout = config.layout
    small = [size for size in _divisors(sequences) if size == 1 or size * config.train.seq_len <= MICROBATCH_TOKENS]
    fill = [size for size in small if schedule_violation(layout.schedule, layout.pp, sequences // size) is None]
    return max(fill or small)


def _warmup_sequences(train: TrainConfig, unit: int) -> int:
    """The largest number of sequences that divides a rank's share of every batch on the way to the whole one."""
    warmup = train.batch_warmup
    assert warmup.start_tokens is not None
    for name in ("start_tokens", "increment_tokens"):
        tokens = getattr(warmup, name)
        if tokens is not None and tokens % unit:
            raise UserError(
                f"train.batch_warmup.{name}={tokens} must be a multiple of train.seq_len={train.seq_len} x "
                f"{unit // train.seq_len} data-parallel ranks = {unit}; {_multiples(tokens, unit)}"
            )
    return math.gcd(train.global_batch_tokens, warmup.start_tokens, warmup.increment_tokens or 0) // unit


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, number + 1) if number % size == 0)


def _near(wanted: int, number: int) -> str:
    """The divisors of ``number`` around ``wanted``, as advice."""
    below = [size for size in _divisors(number) if size < wanted][-1:]
    above = [size for size in _divisors(number) if size > wanted][:1]
    return f"{' or '.join(str(size) for size in below + above)} would do"


def _multiples(wanted: int, unit: int) -> str:
    below = wanted // unit * unit
    return " or ".join(str(size) for size in (below, below + unit) if size) + " would do"
