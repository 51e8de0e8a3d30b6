"""Tokenizers trained from a few lines of text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path


def train(
    kind: str,
    folder: Path,
    texts: Sequence[str],
    end: str | None = "</s>",
    added: Sequence[str] = (),
    wrap: bool = False,
) -> Path:
    """Save a byte-exact tokenizer of `kind` in `folder`; its path as the product takes it.

    end: the end-of-sequence token. added: more tokens. wrap: put `end` around encoded text.
    """
    folder.mkdir(exist_ok=True)
    if kind == "huggingface":
        return _huggingface(folder, texts, end, added, wrap)
    return _sentencepiece(folder, texts, end, added)


def _huggingface(
    folder: Path, texts: Sequence[str], end: str | None, added: Sequence[str], wrap: bool
) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[end] if end else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if wrap and end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{end} $A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    fast.add_tokens(list(added))
    path = folder / "tokenizer"
    fast.save_pretrained(path)
    return path


def _sentencepiece(
    folder: Path, texts: Sequence[str], end: str | None, added: Sequence[str]
) -> Path:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        # Exact: no normalization, no space added or removed.
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n", *added],
        eos_id=2 if end else -1,
        minloglevel=2,
    )
    path = folder / "text.model"
    path.write_bytes(model.getvalue())
    return path
