"""What each pipeline rank holds: layers of both kinds, the embedding, the head. Split as the engine splits (models/partition.py).

Published rows are spread evenly instead, as their frameworks do. Not what any of it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hpcmoe.config.model_schema import MlaConfig, ModelConfig
from hpcmoe.models.partition import chunks, split, stages_of_rank
from hpcmoe.planner.layout import Layout
from hpcmoe.planner.shapes import Shape


@dataclass(frozen=True)
class Chunk:
    """One stage. ``first`` holds the embedding, ``last`` the final norm and the head."""

    dense: int  # layers
    moe: int
    dense_even: int  # of these, those of even number
    moe_even: int
    ends_even: bool  # is its last layer's number even?
    first: bool
    last: bool


Contents = tuple[Chunk, ...]  # of one rank, in the order of its stages


def contents(shape: Shape, layout: Layout, seq: int, even: bool) -> tuple[Contents, ...]:
    """What every pipeline rank holds, by rank. ``even``: one chunk a rank, layers as even as can be, early ranks the rest."""
    return _even(shape, layout.pp) if even else _split(shape, layout.pp, layout.schedule, seq)


@lru_cache(maxsize=512)
def _even(shape: Shape, pp: int) -> tuple[Contents, ...]:
    base, extra = divmod(shape.layers, pp)
    out, begin = [], 0
    for rank in range(pp):
        end = begin + base + (1 if rank < extra else 0)
        out.append((_chunk(shape, range(begin, end), rank == 0, rank == pp - 1),))
        begin = end
    return tuple(out)


@lru_cache(maxsize=512)
def _split(shape: Shape, pp: int, schedule: str, seq: int) -> tuple[Contents, ...]:
    count = pp * chunks(schedule) if pp > 1 else 1
    stages = [_chunk(shape, layers, i == 0, i == count - 1) for i, layers in enumerate(split(to_model(shape), seq, count))]
    if pp == 1:
        return ((stages[0],),)
    return tuple(tuple(stages[stage] for stage in stages_of_rank(schedule, pp, rank)) for rank in range(pp))


def _chunk(shape: Shape, layers: range, first: bool, last: bool) -> Chunk:
    border = min(max(shape.layers - shape.moe_layers, layers.start), layers.stop)
    dense, moe = range(layers.start, border), range(border, layers.stop)
    return Chunk(len(dense), len(moe), _even_numbers(dense), _even_numbers(moe), layers[-1] % 2 == 0, first, last)


def _even_numbers(layers: range) -> int:
    return (layers.stop + 1) // 2 - (layers.start + 1) // 2


def to_model(shape: Shape) -> ModelConfig:
    """The sizes that partition.split reads, from a shape made of a config."""
    mla = None
    if shape.mla is not None:
        mla = MlaConfig(shape.mla.kv_lora, shape.mla.q_lora or None, shape.mla.nope, shape.mla.rope, shape.mla.value)
    return ModelConfig(
        name=shape.name, vocab_size=shape.vocab, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, mla=mla, ffn=shape.ffn, first_dense_layers=shape.dense_layers,
        experts=shape.experts, top_k=shape.top_k, expert_ffn=shape.expert_ffn, shared_ffn=shape.shared_ffn,
    )  # fmt: skip


def telling(ranks: tuple[Contents, ...]) -> tuple[int, ...]:
    """Ranks among which the fullest and the slowest are: of those with the same contents the first and the last.

    What a rank keeps in flight grows or falls evenly with its number, so the ones between are never the worst.
    """
    first: dict[Contents, int] = {}
    last: dict[Contents, int] = {}
    for rank, held in enumerate(ranks):
        first.setdefault(held, rank)
        last[held] = rank
    return tuple(sorted({*first.values(), *last.values()}))
