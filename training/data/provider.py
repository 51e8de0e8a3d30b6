"""The datasets of a run, as Megatron's pretrain asks for them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import is_first_or_last_pipeline_stage

from planning.schema import DataConfig
from training.data.indexed import Weighted, blends, fingerprint, inspect, shares
from training.data.library_text import Prefixes

# (prefixes, weights); weights None only for a single prefix
Blend = tuple[list[str], list[float] | None]
Datasets = Sequence[Any | None]  # train, valid, test; None where not built or not needed

# Bytes per request of a .bin in object storage. Samples are read in random order, so that what
# lies beside one is seldom wanted: Megatron's 256 MiB would be fetched anew for every sample.
S3_CHUNK = 2**20


class StreamedGPTDataset(GPTDataset):  # type: ignore[misc]
    """Megatron's GPTDataset over object storage, in requests of about a sample's size."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        if not dataset_path.startswith("s3://"):
            return IndexedDataset(dataset_path, mmap=False)
        storage = ObjectStorageConfig(config.object_storage_cache_path, bin_chunk_nbytes=S3_CHUNK)
        return IndexedDataset(dataset_path, mmap=False, object_storage_config=storage)


def dataset_provider(
    data: DataConfig, cache: Path, library_text: Prefixes | None = None
) -> Callable[..., Datasets]:
    """Megatron's train_valid_test_datasets_provider for `data`.

    data: its paths are real paths (or s3://), readable by this process. cache: a folder for the
    sample indices, the nodes' own or shared. library_text: where that dataset is, for its kind
    (`library_text.build`). The sequence length, seed and vocabulary are Megatron's arguments.
    """

    def provide(num_samples: Sequence[int], vp_stage: int | None = None) -> Datasets:
        config = dataset_config(data, library_text, get_args(), get_tokenizer())
        return build(
            config, cache, num_samples, partial(is_dataset_built_on_rank, vp_stage=vp_stage)
        )

    provide.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it
    return provide


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """Where batches are read: tensor-parallel rank 0 of the first and the last stage."""
    first_of_group: bool = parallel_state.get_tensor_model_parallel_rank() == 0
    return first_of_group and is_first_or_last_pipeline_stage(vp_stage)


def dataset_config(
    data: DataConfig, library_text: Prefixes | None, args: Any, tokenizer: Any
) -> GPTDatasetConfig:
    """Megatron's configuration of `data`; `args` and `tokenizer` are Megatron's."""
    sources: dict[str, Any] = {}  # none: Megatron makes mock data
    if data.kind == "library_text":
        if library_text is None:
            raise ValueError("data.kind=library_text needs its prefixes")
        prefixes = (library_text.train, library_text.valid, library_text.test)
        sources["blend_per_split"] = [([prefix], None) for prefix in prefixes]
    elif data.kind == "indexed":
        shared, separate = blends(data)
        if shared is not None:
            sources = {"blend": _blend(shared), "split": data.split}
        else:
            sources["blend_per_split"] = [_blend(datasets) for datasets in separate]
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        **sources,
    )


def build(
    config: GPTDatasetConfig,
    cache: Path,
    num_samples: Sequence[int],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Train, valid and test of at least `num_samples` sequences each; every rank calls it."""
    # A split that nothing reads is not built: Megatron would loop forever over an empty one.
    for split, samples in enumerate(num_samples):
        if samples == 0:
            if config.split_matrix is not None:
                config.split_matrix[split] = None
            else:
                config.blend_per_split[split] = None
    prefixes = _prefixes(config)
    remote = any(prefix.startswith("s3://") for prefix in prefixes)
    indices = cache / "indices" / _key(config, prefixes, num_samples)
    config.path_to_cache = str(indices)
    config.object_storage_cache_path = str(indices) if remote else None
    config.mmap_bin_files = not remote
    kind = MockGPTDataset if config.mock else StreamedGPTDataset if remote else GPTDataset
    builder = partial(BlendedMegatronDatasetBuilder, kind, list(num_samples))

    # Megatron lets global rank 0 alone write the sample indices and fetch .idx files, which only
    # a file system shared by all nodes makes visible, and two runs that start together, or a run
    # killed while it writes, leave files that are taken for whole. So one process of each node
    # prepares them first, as if alone, under a lock; what follows only reads.
    if _local_rank() == 0:
        with _locked(indices):
            if not (indices / "complete").exists():
                for file in indices.rglob("*.*"):
                    file.unlink(missing_ok=True)
                with patch("torch.distributed.is_initialized", return_value=False):
                    builder(lambda: True, config).build()
                (indices / "complete").touch()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    datasets: Datasets = builder(is_built_on_rank, config).build()
    return datasets


def _blend(datasets: Weighted) -> Blend | None:
    """Megatron's form. Without weights, several datasets get theirs by tokens here: Megatron
    would otherwise stop after one epoch of them.
    """
    prefixes = [prefix for _, prefix in datasets]
    if len(prefixes) < 2:
        return (prefixes, None) if prefixes else None
    return prefixes, shares(datasets, [inspect(prefix) for prefix in prefixes])


def _prefixes(config: GPTDatasetConfig) -> list[str]:
    blends_ = [config.blend, *(config.blend_per_split or [])]
    return sorted({prefix for blend in blends_ if blend for prefix in blend[0]})


def _key(config: GPTDatasetConfig, prefixes: Sequence[str], num_samples: Sequence[int]) -> str:
    """Of all that the sample indices depend on; Megatron's own names omit the data's contents."""
    parts = (
        config.random_seed,
        config.sequence_length,
        config.split_matrix,
        config.blend,
        config.blend_per_split,
        list(num_samples),
        [fingerprint(prefix) for prefix in prefixes],
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"]) if torch.distributed.is_initialized() else 0


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        with suppress(OSError):  # a file system without locks: safe unless two runs start at once
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
