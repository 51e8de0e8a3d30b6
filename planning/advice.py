"""Warnings about speed, each with the figures that it comes from."""

from __future__ import annotations

from dataclasses import replace

from planning import cost, memory, throughput
from planning.findings import Finding
from planning.hardware import GIB
from planning.rules.base import Facts
from planning.schema import RunConfig, SageMakerLaunch, SlurmLaunch

WORTH = 1.03  # a low precision below this gain over BF16 does not pay for its risk
MORE = 1.10  # a change that gains this much is worth a word
STATES_SHARE = 0.25  # of a step; more says that a step has too few micro batches
_BF16 = {
    "name": "bf16",
    "format": "none",
    "recipe": "none",
    "elements": "none",
    "layers_in_bf16_at_start": 0,
    "layers_in_bf16_at_end": 0,
    "param_gather": False,
    "amax_history": 0,
}


def in_bf16(config: RunConfig) -> RunConfig:
    """The same run with its linear layers in BF16."""
    precision = config.precision.model_copy(update=_BF16)
    return config.model_copy(update={"precision": precision})


def check(config: RunConfig, facts: Facts, speed: throughput.Estimate) -> list[Finding]:
    """`speed` is the estimate of `config`, whose layout is complete."""
    checks = (_low_precision, _micro_batch, _global_batch, _time_limit)
    found = (check(config, facts, speed) for check in checks)
    return [finding for finding in found if finding is not None]


def _warning(id: str, setting: str, message: str, fix: str) -> Finding:
    return Finding(id, "warning", setting, message, fix, "planning/throughput.py")


def _low_precision(config: RunConfig, facts: Facts, speed: throughput.Estimate) -> Finding | None:
    if config.precision.format == "none":
        return None
    plain = throughput.estimate(in_bf16(config), facts)
    if plain is None or (gain := plain.step_s / speed.step_s) >= WORTH:
        return None
    return _warning(
        "low-precision-pays",
        "precision",
        f"{config.precision.name} will not pay: {speed.tokens_per_s_per_gpu:,.0f} tokens/s a GPU "
        f"are predicted, {gain:.2f} times those of BF16",
        "take precision=bf16, or give each product more to do (a larger micro batch, less tensor "
        "parallelism)",
    )


def _micro_batch(config: RunConfig, facts: Facts, speed: throughput.Estimate) -> Finding | None:
    training = config.training
    size, doubled = training.micro_batch, 2 * training.micro_batch
    if training.global_batch_size % (doubled * facts.data_parallel):
        return None
    larger = config.model_copy(
        update={"training": training.model_copy(update={"micro_batch_size": doubled})}
    )
    other = throughput.estimate(larger, facts)
    if other is None or (gain := speed.step_s / other.step_s) < MORE:
        return None
    held, room = memory.estimate(replace(facts, config=larger)), memory.capacity_gib(facts)
    if held is not None and room is not None and held.needed > room * GIB:
        return None
    return _warning(
        "micro-batch",
        "training.micro_batch_size",
        f"{size} gives the GPU little to do at a time: {doubled} is predicted to be "
        f"{gain - 1:.0%} faster",
        f"take {doubled}; layout.cuda_graph=full helps too where launches are what costs",
    )


def _global_batch(config: RunConfig, facts: Facts, speed: throughput.Estimate) -> Finding | None:
    parts, size = speed.parts, config.training.global_batch_size
    share = (parts.get(throughput.STATES, 0.0) + parts.get(throughput.DATA, 0.0)) / speed.step_s
    micro_batches = size // (config.training.micro_batch * facts.data_parallel)
    if share < STATES_SHARE or micro_batches >= 4:
        return None
    return _warning(
        "global-batch-small",
        "training.global_batch_size",
        f"{size} is {micro_batches} micro batch{'es' * (micro_batches > 1)} a GPU: {share:.0%} of "
        "a step goes to gradients, their exchange and the optimizer",
        f"{4 * size} would spread it over four times the tokens, where the learning rate allows",
    )


def _time_limit(config: RunConfig, facts: Facts, speed: throughput.Estimate) -> Finding | None:
    launch = config.launch
    limit = launch.max_run_hours if isinstance(launch, SageMakerLaunch | SlurmLaunch) else None
    hours = cost.estimate(config, speed.step_s).hours
    if limit is None or hours <= limit:
        return None
    return _warning(
        "time-limit",
        "launch.max_run_hours",
        f"the {config.training.train_steps:,} steps take {hours:,.0f} hours by the estimate, and a "
        f"job ends after {limit:g}",
        "raise it, train fewer steps, or start the run again when the job has ended: it goes on "
        "from its newest checkpoint",
    )
