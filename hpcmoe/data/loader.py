"""Batches by position: sample i of the training is the same sequence whatever the number of ranks. The only state is a counter.

Shapes: B sequences, S tokens. Not for reading text (hpcmoe.data.corpus).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hpcmoe.data.corpus import Corpus
from hpcmoe.data.order import permuted, sequence_at
from hpcmoe.errors import UserError

# Which sequences are held out must not depend on the seed: runs that differ in it are then judged by the same text.
SPLIT_SEED, SPLIT_EPOCH = 0, -1


class Loader:
    """Cuts a corpus into sequences of ``seq_len`` tokens and serves any slice of the seeded order.

    ``held_out`` of them, spread over the corpus, are never trained on.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int, held_out: int = 0) -> None:
        self.corpus, self.seq_len, self.seed, self.held_out = corpus, seq_len, seed, held_out
        self.all = (len(corpus.tokens) - 1) // seq_len  # each needs one token more, as the last target
        self.sequences = self.all - held_out
        if self.all < 1:
            raise UserError(
                f"the corpus has {len(corpus.tokens)} tokens, too few for train.seq_len={seq_len}: {corpus.description}"
            )
        if held_out and held_out > self.all // 2:
            raise UserError(
                f"evaluation.batches would hold out {held_out} of the corpus's {self.all} sequences of {seq_len} tokens; "
                f"at most half can be: lower evaluation.batches, or take a larger corpus than {corpus.description}"
            )

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples [first, first + count) of the training: inputs and targets, each int64 [B, S]."""
        return self._rows(self.ids(first, count))

    def ids(self, first: int, count: int) -> list[int]:
        """Which sequences of the corpus these samples are: what does not depend on the number of ranks."""
        return [self._sequence(sequence_at(i, self.sequences, self.seed)) for i in range(first, first + count)]

    def _sequence(self, index: int) -> int:
        """Where sequence ``index`` lies in the corpus: those for training come first, then those held out."""
        return permuted(index, self.all, SPLIT_SEED, SPLIT_EPOCH) if self.held_out else index

    def _rows(self, sequences: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = np.empty((len(sequences), self.seq_len + 1), dtype=np.int64)
        for i, sequence in enumerate(sequences):
            start = sequence * self.seq_len
            rows[i] = self.corpus.tokens[start : start + self.seq_len + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def microbatches(
        self, first: int, global_batch: int, rank: int, ranks: int, microbatch: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Data-parallel ``rank``'s slice of the step whose samples start at ``first``, in microbatches."""
        share = global_batch // ranks
        for offset in range(0, share, microbatch):
            yield self.batch(first + rank * share + offset, min(microbatch, share - offset))

    def held_out_microbatches(
        self, first: int, batch: int, rank: int, ranks: int, microbatch: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same of the held-out sequences [first, first + batch), which have one order."""
        share = batch // ranks
        begin = self.sequences + first + rank * share
        for offset in range(0, share, microbatch):
            many = min(microbatch, share - offset)
            yield self._rows([self._sequence(i) for i in range(begin + offset, begin + offset + many)])
