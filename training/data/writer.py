"""Writing of prepared token files, by Megatron's own IndexedDatasetBuilder."""

from __future__ import annotations

import gc
import logging
import warnings
from typing import Any

from training.data.indexed import write_sidecar
from training.data.tokenizers import Tokenizer


def builder_classes() -> tuple[Any, Any]:
    """Megatron's (IndexedDatasetBuilder, DType).

    The import takes 5 to 15 seconds, so it happens only where something is written, and it warns
    of accelerator libraries that writing files does not need: that is kept from the screen.
    """
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    finally:
        logging.disable(logging.NOTSET)
    warnings.filterwarnings("ignore", "Could not determine rank", module="megatron")
    return IndexedDatasetBuilder, DType


class Writer:
    """Writes `prefix`.bin document by document; `close` adds .idx and the .json beside them."""

    def __init__(self, prefix: str, tokenizer: Tokenizer) -> None:
        builder, dtypes = builder_classes()
        # uint16 below 65500 ids, else int32.
        dtype = dtypes.optimal_dtype(tokenizer.vocab_size)
        self._builder = builder(f"{prefix}.bin", dtype=dtype)
        self._prefix, self._tokenizer = prefix, tokenizer
        self.documents = 0
        self.tokens = 0

    def add(self, text: str) -> bool:
        """Add a document and its end; False if the text has no tokens."""
        ids = self._tokenizer.encode(text)
        if not ids:
            return False
        ids.append(self._tokenizer.end_of_document)
        self._builder.add_document(ids, [len(ids)])
        self.documents += 1
        self.tokens += len(ids)
        return True

    def add_prefix(self, prefix: str, documents: int, tokens: int) -> None:
        """Append all of another dataset, which holds `documents` and `tokens`."""
        # add_index collects garbage each time: 0.4 s with Megatron's modules loaded, unless all
        # that lives now is exempted.
        gc.freeze()
        self._builder.add_index(prefix)
        gc.unfreeze()
        self.documents += documents
        self.tokens += tokens

    def close(self) -> None:
        self._builder.finalize(f"{self._prefix}.idx")
        write_sidecar(self._prefix, self._tokenizer, self.documents, self.tokens)
