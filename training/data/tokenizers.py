"""Tokenizers for preparing data. Training reads token ids and needs none of them.

A tokenizer here turns text into ids and knows its vocabulary size and the id that ends a
document; nothing else of it is used.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

from planning.findings import ChoiceError, Finding
from planning.schema import TokenizerConfig
from training.data.indexed import PreparedBy


class Tokenizer(PreparedBy, Protocol):
    """`end_of_document` is an id below `vocab_size`."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 ends a document."""

    kind = "byte"
    path = None
    vocab_size = 257
    end_of_document = 256
    fingerprint = "byte"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8")


class HuggingFaceTokenizer:
    """A tokenizer of the transformers library: a folder, or a name that the library knows."""

    kind = "huggingface"

    def __init__(self, path: str, end_of_document: str | None = None) -> None:
        from transformers import AutoTokenizer

        local = Path(path).expanduser()
        # A hub's names have one slash; a mistyped folder would be looked up there for a minute.
        looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or local.exists()
        if looks_local and not local.is_dir():
            raise _error(
                f"{path} is not a folder",
                "give the folder that holds tokenizer.json and tokenizer_config.json",
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(local) if looks_local else path
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise _error(
                f"cannot load the tokenizer {path}: {first}",
                "give the folder of a tokenizer saved by the transformers library, or its name",
            ) from error
        self.path = path
        # len() counts added tokens too; vocab_size does not.
        self.vocab_size = len(self._tokenizer)
        self.end_of_document = self._end_of_document(end_of_document)
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        state = (
            self._fast.to_str() if self._fast else repr(sorted(self._tokenizer.get_vocab().items()))
        )
        self.fingerprint = hashlib.sha256(state.encode()).hexdigest()[:16]

    def _end_of_document(self, token: str | None) -> int:
        if token is None:
            if self._tokenizer.eos_token_id is None:
                raise _error(
                    f"the tokenizer {self.path} names no end-of-sequence token, so nothing would "
                    "end a document",
                    "set eos_token in tokenizer_config.json, or name one of its tokens with "
                    "--end-of-document",
                )
            return int(self._tokenizer.eos_token_id)
        return _token_id(self._tokenizer.get_vocab(), token, self.path)

    def encode(self, text: str) -> list[int]:
        # A sequence's start and end tokens are not ours to add; the document's end is.
        ids: list[int] = (
            self._fast.encode(text, add_special_tokens=False).ids
            if self._fast
            else self._tokenizer.encode(text, add_special_tokens=False)
        )
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


class SentencePieceTokenizer:
    """A SentencePiece .model file."""

    kind = "sentencepiece"

    def __init__(self, path: str, end_of_document: str | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        file = Path(path).expanduser()
        if not file.is_file():
            raise _error(f"{path} is not a file", "give the .model file that SentencePiece wrote")
        content = file.read_bytes()
        try:
            self._tokenizer: Any = SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise _error(
                f"{path} is not a SentencePiece model",
                "give the .model file that it wrote",
            ) from error
        self.path = path
        self.vocab_size = int(self._tokenizer.vocab_size())
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        if end_of_document is not None:
            pieces = {self._tokenizer.id_to_piece(i): i for i in range(self.vocab_size)}
            self.end_of_document = _token_id(pieces, end_of_document, path)
        elif self._tokenizer.eos_id() >= 0:
            self.end_of_document = int(self._tokenizer.eos_id())
        else:
            raise _error(
                f"the model {path} has no </s> piece, so nothing would end a document",
                "train it with an eos_id, or name one of its pieces with --end-of-document",
            )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text


def load(choice: TokenizerConfig, end_of_document: str | None = None) -> Tokenizer:
    """The chosen tokenizer; `end_of_document` names another token than its end-of-sequence one.

    Raises ChoiceError for a missing file, a file of another kind, and a tokenizer that has no
    token to end a document with.
    """
    if choice.kind == "byte":
        return ByteTokenizer()
    if choice.kind == "none":
        raise _error(
            "kind=none has no tokenizer to prepare data with",
            "choose byte, huggingface or sentencepiece",
            "data.tokenizer.kind",
        )
    if choice.path is None:
        raise _error(
            f"kind={choice.kind} needs a path",
            "give the tokenizer's folder (huggingface) or .model file (sentencepiece)",
        )
    if choice.kind == "huggingface":
        return HuggingFaceTokenizer(choice.path, end_of_document)
    return SentencePieceTokenizer(choice.path, end_of_document)


def _token_id(vocabulary: dict[str, int], token: str, path: str) -> int:
    if token not in vocabulary:
        raise _error(f"{path} has no token {token!r}", "name one that is in its vocabulary")
    return int(vocabulary[token])


def _error(message: str, fix: str, setting: str = "data.tokenizer.path") -> ChoiceError:
    return ChoiceError(Finding("tokenizer", "error", setting, message, fix))
