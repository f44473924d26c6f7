"""What is held out is never trained on, whatever the seed and the ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcmoe.data.corpus import Corpus
from hpcmoe.data.loader import Loader
from hpcmoe.errors import UserError

SEQ = 4


def corpus(sequences: int) -> Corpus:
    """Token = number of its sequence."""
    return Corpus(np.arange(sequences * SEQ + 1, dtype=np.uint32) // SEQ, "print", "numbers")


def trained_on(loader: Loader, samples: int) -> list[int]:
    return loader.batch(0, samples)[0][:, 0].tolist()


def held_out(loader: Loader, ranks: int = 1, microbatch: int = 1) -> list[int]:
    """By rank after rank."""
    batches = [loader.held_out_microbatches(0, loader.held_out, rank, ranks, microbatch) for rank in range(ranks)]
    return [sequence for rank in batches for inputs, _ in rank for sequence in inputs[:, 0].tolist()]


@given(
    sequences=st.integers(2, 200),
    part=st.floats(0.01, 0.5),
    seed=st.integers(0, 5),
    ranks=st.integers(1, 4),
    many=st.integers(1, 3),
)
def test_held_out_and_trained_on_are_the_whole_corpus_and_share_nothing(
    sequences: int, part: float, seed: int, ranks: int, many: int
) -> None:
    kept = max(ranks, int(sequences * part)) // ranks * ranks
    if kept > sequences // 2:
        return
    loader = Loader(corpus(sequences), SEQ, seed, kept)
    epoch, out = trained_on(loader, loader.sequences), held_out(loader, ranks, many)
    assert sorted(epoch + out) == list(range(sequences))
    assert set(trained_on(loader, 3 * sequences)).isdisjoint(out), "in later epochs neither"
    assert out == held_out(Loader(corpus(sequences), SEQ, seed + 1, kept)), "other seeds are judged by the same text"


def test_held_out_sequences_are_spread_over_the_corpus() -> None:
    out = held_out(Loader(corpus(1000), SEQ, 0, 100))
    assert {sequence // 250 for sequence in out} == {0, 1, 2, 3}
    assert max(out) - min(out) > 900


def test_without_evaluation_nothing_is_held_out() -> None:
    assert sorted(trained_on(Loader(corpus(50), SEQ, 3), 50)) == list(range(50))


def test_more_than_half_of_a_corpus_cannot_be_held_out() -> None:
    with pytest.raises(UserError, match="would hold out 6 of the corpus's 10 sequences of 4 tokens; at most half can be"):
        Loader(corpus(10), SEQ, 0, 6)
