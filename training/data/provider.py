"""The datasets of a run, as Megatron's pretrain asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args
from megatron.training.utils import is_first_or_last_pipeline_stage

from planning.schema import DataConfig
from training.data.indexed import Weighted, blends, inspect, shares
from training.data.library_text import Prefixes

# (prefixes, weights); weights None only for a single prefix
Blend = tuple[list[str], list[float] | None]
Datasets = Sequence[Any | None]  # train, valid, test; None where not built or not needed


def dataset_provider(
    data: DataConfig, cache: Path, library_text: Prefixes | None = None
) -> Callable[..., Datasets]:
    """Megatron's train_valid_test_datasets_provider for `data`.

    data: its paths are real paths (or s3://), readable by this process. cache: a folder for the
    sample indices, on a file system that all nodes share, because rank 0 alone writes them.
    library_text: where that dataset is, for its kind (`library_text.build`).
    The sequence length, seed and vocabulary are Megatron's arguments.
    """

    def provide(num_samples: Sequence[int], vp_stage: int | None = None) -> Datasets:
        config = dataset_config(data, cache, library_text, get_args())
        return build(
            data,
            config,
            num_samples,
            partial(is_dataset_built_on_rank, vp_stage=vp_stage),
        )

    provide.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it
    return provide


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """Where batches are read: tensor-parallel rank 0 of the first and the last stage."""
    return (
        is_first_or_last_pipeline_stage(vp_stage)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def dataset_config(
    data: DataConfig, cache: Path, library_text: Prefixes | None, args: Any
) -> GPTDatasetConfig:
    """Megatron's configuration of `data`; `args` are Megatron's arguments."""
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
    names = [*data.paths, *data.train_paths, *data.valid_paths, *data.test_paths]
    remote = "s3://" in str(names)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=build_tokenizer(args),
        path_to_cache=str(cache / "indices"),
        # Object storage has no memory map; its .idx files are copied here.
        mmap_bin_files=not remote,
        object_storage_cache_path=str(cache / "s3") if remote else None,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        **sources,
    )


def build(
    data: DataConfig,
    config: GPTDatasetConfig,
    num_samples: Sequence[int],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Train, valid and test of at least `num_samples` sequences each."""
    # A split that nothing reads is not built: Megatron would loop forever over an empty one.
    for split, samples in enumerate(num_samples):
        if samples == 0:
            if config.split_matrix is not None:
                config.split_matrix[split] = None
            else:
                config.blend_per_split[split] = None
    kind = MockGPTDataset if data.kind == "mock" else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, list(num_samples), is_built_on_rank, config).build()


def _blend(datasets: Weighted) -> Blend | None:
    """Megatron's form. Without weights, several datasets get theirs by tokens here: Megatron
    would otherwise stop after one epoch of them.
    """
    prefixes = [prefix for _, prefix in datasets]
    if len(prefixes) < 2:
        return (prefixes, None) if prefixes else None
    return prefixes, shares(datasets, [inspect(prefix) for prefix in prefixes])
