"""One micro-batch, as the ranks of a model-parallel group see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args
from megatron.training.utils import is_first_or_last_pipeline_stage

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
# Of packed sequences, which pretraining does not use; the functions below look them up.
UNUSED = (
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)


def get_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None = None
) -> dict[str, Any]:
    """The next micro-batch on this rank's device.

    Returns tokens, labels, loss_mask, position_ids, each [micro batch, sequence / CP], and
    attention_mask (None unless Megatron was told to make it in the data loader). What this
    pipeline stage does not need is None. Only tensor-parallel rank 0 of the first and the last
    stage reads `data_iterator`; the others receive its batch.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(KEYS)
    args = get_args()
    batch: dict[str, Any] = {}
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        assert data_iterator is not None
        loaded = next(data_iterator)
        batch = dict.fromkeys(KEYS + UNUSED)
        for key in KEYS:
            if loaded.get(key) is not None:
                batch[key] = loaded[key].cuda(non_blocking=True)
    ignore_virtual = vp_stage is None
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(
            ignore_virtual=ignore_virtual, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(
            ignore_virtual=ignore_virtual, vp_stage=vp_stage
        ),
    )
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    return {key: batch.get(key) for key in KEYS}
