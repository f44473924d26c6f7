"""The order of samples is a permutation each epoch, a function of (seed, position), and the same for any number of ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcmoe.data.corpus import Corpus
from hpcmoe.data.loader import Loader
from hpcmoe.data.order import permuted, sequence_at
from hpcmoe.errors import UserError


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_each_epoch_sees_every_sequence_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(i, size, seed, epoch) for i in range(size)) == list(range(size))


def test_the_order_is_pinned_for_ever() -> None:
    """A change here changes the data order of every run that is resumed: never update these numbers."""
    assert [sequence_at(i, 10, seed=0) for i in range(20)] == PINNED


PINNED = [6, 3, 7, 2, 4, 5, 8, 9, 0, 1, 1, 5, 4, 2, 3, 8, 6, 0, 7, 9]


def test_epochs_and_seeds_differ_and_neighbours_are_spread() -> None:
    first = [permuted(i, 1000, 0, 0) for i in range(1000)]
    assert first != [permuted(i, 1000, 0, 1) for i in range(1000)]
    assert first != [permuted(i, 1000, 1, 0) for i in range(1000)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(first)) < 20
    assert np.corrcoef(np.arange(1000), first)[0, 1] == pytest.approx(0, abs=0.1)


def loader(tokens: int = 1000, seq_len: int = 9) -> Loader:
    return Loader(Corpus(np.arange(tokens, dtype=np.uint16), "print", "numbers"), seq_len, seed=7)


def seen(ranks: int, microbatch: int, first: int) -> torch.Tensor:
    """The inputs of one step of 24 samples, in global order."""
    parts = [inputs for rank in range(ranks) for inputs, _ in loader().microbatches(first, 24, rank, ranks, microbatch)]
    return torch.cat(parts)


@pytest.mark.parametrize(("ranks", "microbatch"), [(1, 24), (1, 5), (2, 4), (4, 3), (8, 3), (24, 1)])
def test_a_step_holds_the_same_samples_in_the_same_order_for_any_ranks_and_microbatch(ranks: int, microbatch: int) -> None:
    assert torch.equal(seen(ranks, microbatch, first=240), seen(1, 24, first=240))


def test_targets_are_the_inputs_shifted_by_one_and_sequences_do_not_overlap() -> None:
    inputs, targets = loader().batch(0, 111)
    assert torch.equal(targets[:, :-1], inputs[:, 1:])
    assert torch.equal(targets[:, -1], inputs[:, -1] + 1)
    assert len(inputs.flatten().unique()) == 111 * 9, "one epoch repeats nothing"


def test_a_corpus_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(UserError, match=r"the corpus has 9 tokens, too few for train.seq_len=9"):
        loader(tokens=9)
