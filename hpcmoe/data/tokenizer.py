"""The byte tokenizer: token i is byte i, and one more token ends a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcmoe.errors import UserError, unknown_name

if TYPE_CHECKING:
    import numpy as np  # at run time inside functions: submit asks check_vocabulary and should not wait for it

END_OF_DOCUMENT = 256
BYTE_VOCAB = 257
TOKENIZERS = ("byte",)


def encode_documents(documents: list[bytes]) -> np.ndarray:
    """All documents as one uint16 array, each followed by END_OF_DOCUMENT."""
    import numpy as np

    total = sum(map(len, documents)) + len(documents)
    tokens = np.empty(total, dtype=np.uint16)
    at = 0
    for document in documents:
        tokens[at : at + len(document)] = np.frombuffer(document, dtype=np.uint8)
        at += len(document)
        tokens[at] = END_OF_DOCUMENT
        at += 1
    return tokens


def decode(tokens: np.ndarray) -> str:
    """Text of ``tokens``, for people: ends of documents become blank lines, broken UTF-8 is replaced."""
    parts = bytes(int(t) if t < END_OF_DOCUMENT else 10 for t in tokens.tolist())
    return parts.decode("utf-8", errors="replace")


def check_vocabulary(tokenizer: str, vocab_size: int) -> None:
    if tokenizer not in TOKENIZERS:
        raise UserError(unknown_name("data.tokenizer", tokenizer, TOKENIZERS))
    if vocab_size < BYTE_VOCAB:
        raise UserError(f"model.vocab_size={vocab_size} is too small for data.tokenizer=byte, which has {BYTE_VOCAB} tokens")
