"""What a run costs, from the price that the user sets (hardware.price_per_node_hour).

Training steps only: evaluation, checkpoints, start-up and storage come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from planning.schema import RunConfig


@dataclass(frozen=True)
class Cost:
    """Time and money of the whole run. USD are None where no price is set."""

    hours: float  # of all steps
    gpu_hours: float
    gpu_hours_per_billion_tokens: float
    usd_per_step: float | None
    usd_per_billion_tokens: float | None
    usd: float | None  # the whole run


def estimate(config: RunConfig, step_s: float) -> Cost:
    """The cost of `config` at `step_s` seconds a step. All nodes are paid for all of the time."""
    hardware, training = config.hardware, config.training
    gpus = hardware.nodes * (hardware.gpus_per_node or 1)
    step_hours = step_s / 3600
    billions = training.global_batch_size * config.model.seq_length / 1e9
    price = hardware.price_per_node_hour
    per_step = None if price is None else price * hardware.nodes * step_hours
    return Cost(
        hours=step_hours * training.train_steps,
        gpu_hours=step_hours * training.train_steps * gpus,
        gpu_hours_per_billion_tokens=step_hours * gpus / billions,
        usd_per_step=per_step,
        usd_per_billion_tokens=None if per_step is None else per_step / billions,
        usd=None if per_step is None else per_step * training.train_steps,
    )
