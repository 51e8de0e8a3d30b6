"""Megatron's writer of .bin/.idx, behind its import."""

from __future__ import annotations

import logging
import warnings
from typing import Any


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
    return IndexedDatasetBuilder, DType
