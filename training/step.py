"""The forward pass of one micro-batch and its loss, as Megatron's schedules call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from training.data.batch import get_batch

LOSS = "lm loss"


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """The model's output for the next micro-batch, and the function that makes it a loss."""
    stage = get_attr_wrapped_model(model, "vp_stage")
    batch = get_batch(data_iterator, stage)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_of, batch["loss_mask"])


def loss_of(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum of the losses in nats, tokens counted, the same pair for reporting).

    Both inputs are [micro batch, sequence / CP]. Megatron divides a micro-batch's sum by its tokens
    and averages the micro-batches; the report is the mean over the tokens of the whole batch.
    """
    mask = loss_mask.view(-1).float()
    total = torch.sum(token_losses.float().view(-1) * mask)
    tokens = mask.sum().to(torch.int)
    return total, tokens, {LOSS: torch.stack([total.detach(), tokens.float()])}
