"""Which configs this engine runs; torch-free, so that validation can refuse the others before anything is submitted.

Model shapes: hpcmoe.models.support. Not for choosing a layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.config.schema import Config, Precision
from hpcmoe.data.tokenizer import check_vocabulary
from hpcmoe.engine.schedule import batch_stairs
from hpcmoe.errors import UserError
from hpcmoe.models.partition import SPLIT_BACKWARD, chunks, schedule_violation
from hpcmoe.models.support import check_model, shared_width

# A bf16 value's neighbours are 2^-8 to 2^-7 of it away. With beta = 0.999 a moment could never decay: 0.1 % is less than half of
# that. With 0.99 one step without gradients takes 1 % off, more than a whole neighbour's distance.
HIGHEST_BETA = 0.99


@dataclass(frozen=True)
class Sizes:
    """The layout in numbers. Sequences unless said otherwise."""

    dp_replicate: int  # ranks
    dp_shard: int  # ranks
    tp: int
    pp: int
    ep: int
    efsdp: int  # ranks over which one expert is sharded: dp_shard * tp / ep
    global_batch: int
    microbatch: int
    ep_placement: str = "inside"  # inside: ep is innermost of efsdp x ep; across: efsdp is
    schedule: str = "1F1B"

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        sizes = (
            f"pp={self.pp} dp_replicate={self.dp_replicate} dp_shard={self.dp_shard} tp={self.tp} ep={self.ep} efsdp={self.efsdp}"
        )
        schedule = f" schedule={self.schedule}" if self.pp > 1 else ""
        return sizes + schedule + (" ep_placement=across" if self.ep_placement == "across" else "")


def resolve_sizes(config: Config) -> Sizes:
    """The numbers of a validated config. They are checked again: config.yaml may have been edited, and ranks would hang."""
    layout, train, world = config.layout, config.train, config.world_size
    if layout.dp_shard is None or layout.ep is None or layout.microbatch is None:
        raise UserError("config.yaml leaves layout.dp_shard, layout.ep or layout.microbatch open; submit resolves them")
    ranks = layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp
    if ranks != world:
        raise UserError(
            f"the layout has {ranks} ranks, the run {world} (nodes={config.nodes} x gpus_per_node={config.gpus_per_node})"
        )
    if layout.dp_shard * layout.tp % layout.ep or config.model.experts % layout.ep:
        raise UserError(f"layout.ep={layout.ep} must divide dp_shard x tp and model.experts={config.model.experts}")
    batch, rest = divmod(train.global_batch_tokens, train.seq_len)
    data_ranks = layout.dp_replicate * layout.dp_shard
    if rest or batch % (data_ranks * layout.microbatch):
        raise UserError(
            f"train.global_batch_tokens={train.global_batch_tokens} must be a multiple of {data_ranks} data-parallel ranks x "
            f"layout.microbatch={layout.microbatch} x train.seq_len={train.seq_len}"
        )
    efsdp = layout.dp_shard * layout.tp // layout.ep
    placement = layout.ep_placement or "inside"
    return Sizes(
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        efsdp=efsdp,
        global_batch=batch,
        microbatch=layout.microbatch,
        ep_placement=placement,
        schedule=layout.schedule,
    )


def layout_violation(model: ModelConfig, seq_len: int, sizes: Sizes) -> str | None:
    """What the model forbids about tensor and pipeline parallelism; None when the layout can be built."""
    split = {"heads": model.heads, "kv_heads": model.kv_heads, "vocab_size": model.vocab_size}
    split |= {"shared width": shared_width(model), "ffn": model.ffn if model.first_dense_layers else 0}
    for name, size in split.items():
        if size % sizes.tp:
            return f"layout.tp={sizes.tp} does not divide model.{name}={size}"
    if seq_len % sizes.tp:
        return f"layout.tp={sizes.tp} does not divide train.seq_len={seq_len} (each rank holds a part of the sequence)"
    if sizes.pp == 1:
        return None
    stages = sizes.pp * chunks(sizes.schedule)
    if stages > model.layers:
        return (
            f"layout.pp={sizes.pp} with {sizes.schedule} makes {stages} stages of model.layers={model.layers}; use at most that"
        )
    if model.tied_embeddings:
        return (
            f"model.tied_embeddings=true cannot be split over layout.pp={sizes.pp}: input table and head are one matrix; use pp=1"
        )
    return schedule_violation(sizes.schedule, sizes.pp, sizes.global_batch // sizes.data_ranks // sizes.microbatch)


def recompute_violation(recompute: str, schedule: str, pp: int) -> str | None:
    """Why blocks cannot be computed again under this schedule; None when they can.

    Schedules that split the backward pass walk a block's graph once for its input and once for each group of weights, and every
    walk would compute the block again.
    """
    if recompute != "none" and pp > 1 and schedule in SPLIT_BACKWARD:
        return (
            f"layout.recompute={recompute} does not go with layout.schedule={schedule}, which would compute a block again for "
            "each part of its backward pass; use recompute=none, or 1F1B, GPipe, Interleaved1F1B or LoopedBFS"
        )
    return None


def betas_violation(betas: list[float]) -> str | None:
    """Why moments with these betas cannot be kept in bf16; None when they can."""
    beyond = [beta for beta in betas if beta > HIGHEST_BETA]
    if not beyond:
        return None
    return (
        f"precision.moments=bf16 with optim.betas={betas}: bf16 rounds away what a moment of beta={max(beyond)} changes in a "
        f"step; use betas up to {HIGHEST_BETA}, or precision.moments=fp32"
    )


def _warmup_violation(config: Config, sizes: Sizes) -> str | None:
    """What makes a batch smaller than the whole one impossible; None when each can be trained on."""
    unit = config.train.seq_len * sizes.data_ranks * sizes.microbatch
    for tokens in batch_stairs(config.train)[:-1]:
        microbatches, rest = divmod(tokens, unit)
        if rest:
            return f"train.batch_warmup: a batch of {tokens} tokens is not a multiple of ranks x microbatch x seq_len = {unit}"
        problem = schedule_violation(sizes.schedule, sizes.pp, microbatches)
        if problem is not None:
            return f"train.batch_warmup: a batch of {tokens} tokens: {problem}"
    return None


def check_engine(config: Config) -> Sizes:
    """Raise UserError for what this engine cannot run; the layout's sizes otherwise."""
    check_model(config.model)
    check_vocabulary(config.data.tokenizer, config.model.vocab_size)
    sizes = resolve_sizes(config)
    problem = layout_violation(config.model, config.train.seq_len, sizes)
    if problem is not None:
        raise UserError(problem)
    problem = _warmup_violation(config, sizes)
    if problem is not None:
        raise UserError(problem)
    problem = recompute_violation(config.layout.recompute, sizes.schedule, sizes.pp)
    if problem is not None:
        raise UserError(problem)
    if config.precision.name is None and config.cluster.device == "cuda":
        raise UserError("config.yaml leaves precision.name open; submit resolves it")
    if config.precision.name is Precision.fp8:
        raise UserError("precision.name=fp8: this engine trains in bf16 or fp32")
    problem = betas_violation(config.optim.betas) if config.precision.moments == "bf16" else None
    if problem is not None:
        raise UserError(problem)
    return sizes
