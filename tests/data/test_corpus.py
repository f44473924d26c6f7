"""What is read, in which order, and how a change of text is noticed."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from hpcmoe.config.schema import DataConfig
from hpcmoe.data.corpus import load_corpus
from hpcmoe.data.tokenizer import BYTE_VOCAB, END_OF_DOCUMENT, check_vocabulary, decode, encode_documents
from hpcmoe.errors import UserError


def text(folder: Path, **files: str) -> DataConfig:
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return DataConfig(source="text", path=str(folder))


def test_documents_are_read_by_name_and_end_with_their_own_token(tmp_path: Path) -> None:
    corpus = load_corpus(text(tmp_path, b="two", a__z="one", c=""))
    assert corpus.tokens.tolist() == [*b"one", END_OF_DOCUMENT, *b"two", END_OF_DOCUMENT]
    assert "2 files" in corpus.description


def test_the_fingerprint_knows_the_text_and_where_documents_end(tmp_path: Path) -> None:
    prints = {
        load_corpus(text(tmp_path / str(i), **files)).fingerprint
        for i, files in enumerate([{"a": "xy", "b": "z"}, {"a": "x", "b": "yz"}, {"a": "xyz"}, {"a": "xyZ"}])
    }
    assert len(prints) == 4
    assert load_corpus(text(tmp_path / "again", a="xyz")).fingerprint in prints


def test_a_corpus_is_cut_after_max_bytes(tmp_path: Path) -> None:
    data = text(tmp_path, a="12345", b="67890")
    data.max_bytes = 7
    assert decode(load_corpus(data).tokens) == "12345\n67\n"


def test_one_file_can_be_a_corpus(tmp_path: Path) -> None:
    text(tmp_path, a="alone")
    assert decode(load_corpus(DataConfig(source="text", path=str(tmp_path / "a.txt"))).tokens) == "alone\n"


def test_pythons_own_sources_are_a_corpus_without_site_packages() -> None:
    corpus = load_corpus(DataConfig())
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    first = min((p for p in stdlib.iterdir() if p.suffix == ".py" and p.stat().st_size), key=lambda p: p.name)
    assert len(corpus.tokens) > 5_000_000
    assert corpus.tokens.dtype == np.uint16
    assert "standard library of Python 3." in corpus.description
    assert encode_documents([first.read_bytes()]).tobytes() in corpus.tokens.tobytes()
    assert corpus.fingerprint == load_corpus(DataConfig()).fingerprint
    assert load_corpus(DataConfig(max_bytes=1000)).fingerprint != corpus.fingerprint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(source="text"), "needs data.path"),
        (DataConfig(source="text", path="/nowhere"), "data.path=/nowhere does not exist"),
        (DataConfig(source="txt"), "did you mean 'text'"),
    ],
)
def test_a_corpus_that_cannot_be_is_one_clear_line(data: DataConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_corpus(data)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text found in"):
        load_corpus(DataConfig(source="text", path=str(tmp_path)))


def test_the_vocabulary_must_hold_all_bytes_and_the_end() -> None:
    check_vocabulary("byte", BYTE_VOCAB)
    with pytest.raises(UserError, match=r"model.vocab_size=256 is too small .* 257 tokens"):
        check_vocabulary("byte", 256)
