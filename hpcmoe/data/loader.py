"""Batches by position: sample i of the training is the same sequence whatever the number of ranks. The only state is a counter.

Shapes: B sequences, S tokens. Not for reading text (hpcmoe.data.corpus).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hpcmoe.data.corpus import Corpus
from hpcmoe.data.order import sequence_at
from hpcmoe.errors import UserError


class Loader:
    """Cuts a corpus into sequences of ``seq_len`` tokens and serves any slice of the seeded order."""

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.sequences = (len(corpus.tokens) - 1) // seq_len  # each needs one token more, as the last target
        if self.sequences < 1:
            raise UserError(
                f"the corpus has {len(corpus.tokens)} tokens, too few for train.seq_len={seq_len}: {corpus.description}"
            )

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples [first, first + count) of the training: inputs and targets, each int64 [B, S]."""
        rows = np.empty((count, self.seq_len + 1), dtype=np.int64)
        for i in range(count):
            start = sequence_at(first + i, self.sequences, self.seed) * self.seq_len
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
