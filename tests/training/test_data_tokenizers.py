"""Tokenizers for preparing data: byte, Hugging Face and SentencePiece, each trained on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest

from planning.findings import ChoiceError
from planning.schema import TokenizerConfig
from tests.training import tokenizer_files
from training.data import tokenizers

TEXT = "def f(x):\n    return x + 1  # naïve café\n"


def choose(kind: str, path: object = None) -> TokenizerConfig:
    return TokenizerConfig(kind=kind, path=None if path is None else str(path), vocab_size=None)


def test_bytes_are_ids_and_256_ends_a_document() -> None:
    tokenizer = tokenizers.load(choose("byte"))
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_a_trained_tokenizer_gives_the_text_back(kind: str, tmp_path: Path) -> None:
    path = tokenizer_files.train(kind, tmp_path, [TEXT * 20])
    tokenizer = tokenizers.load(choose(kind, path))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert 5 < len(ids) < len(TEXT)
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.end_of_document not in ids
    assert tokenizer.end_of_document < tokenizer.vocab_size


def test_added_tokens_count_in_the_vocabulary(tmp_path: Path) -> None:
    path = tokenizer_files.train("huggingface", tmp_path, [TEXT * 20], added=["<|extra|>"])
    tokenizer = tokenizers.load(choose("huggingface", path))
    assert tokenizer.encode("<|extra|>") == [tokenizer.vocab_size - 1]


def test_start_and_end_tokens_of_the_tokenizer_are_not_added(tmp_path: Path) -> None:
    """A tokenizer that wraps text in </s>, as many do, must not do so inside a document."""
    path = tokenizer_files.train("huggingface", tmp_path, [TEXT * 20], wrap=True)
    tokenizer = tokenizers.load(choose("huggingface", path))
    assert tokenizer.end_of_document not in tokenizer.encode(TEXT)


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_another_token_may_end_a_document(kind: str, tmp_path: Path) -> None:
    path = tokenizer_files.train(kind, tmp_path, [TEXT * 20], end=None, added=["<end>"])
    with pytest.raises(ChoiceError, match=r"nothing would end a document"):
        tokenizers.load(choose(kind, path))
    tokenizer = tokenizers.load(choose(kind, path), end_of_document="<end>")
    assert tokenizer.decode([tokenizer.end_of_document]) == "<end>"
    with pytest.raises(ChoiceError, match=r"has no token '<fin>'"):
        tokenizers.load(choose(kind, path), end_of_document="<fin>")


def test_the_same_tokenizer_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first = tokenizer_files.train("huggingface", tmp_path / "a", [TEXT * 20])
    copy = first.rename(tmp_path / "b" / "moved")
    other = tokenizer_files.train("huggingface", tmp_path / "c", [TEXT.upper() * 20])
    fingerprints = {
        tokenizers.load(choose("huggingface", path)).fingerprint for path in (copy, other)
    }
    again = tokenizer_files.train("huggingface", tmp_path / "a", [TEXT * 20])
    assert len(fingerprints) == 2
    assert tokenizers.load(choose("huggingface", again)).fingerprint in fingerprints


@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [
        ("huggingface", None, "kind=huggingface needs a path"),
        ("huggingface", "./nowhere", "./nowhere is not a folder"),
        ("sentencepiece", "nowhere.model", "nowhere.model is not a file"),
        ("none", None, "kind=none has no tokenizer"),
    ],
)
def test_what_is_not_there_is_one_error(kind: str, path: str | None, words: str) -> None:
    with pytest.raises(ChoiceError, match=words) as caught:
        tokenizers.load(choose(kind, path))
    assert len(caught.value.findings) == 1
    assert caught.value.findings[0].setting.startswith("data.tokenizer.")


def test_a_file_of_another_kind_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ChoiceError, match="is not a SentencePiece model"):
        tokenizers.load(choose("sentencepiece", tmp_path / "bad.model"))
    with pytest.raises(ChoiceError, match="cannot load the tokenizer"):
        tokenizers.load(choose("huggingface", tmp_path))
