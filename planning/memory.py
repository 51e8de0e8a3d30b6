"""Memory of the states of training on one GPU: weights, gradients and optimizer, exactly.

Activations, buffers and the context are not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from planning.parameters import RankParameters, per_rank
from planning.pattern import blocks, split_stages
from planning.schema import LayoutConfig, ModelConfig, PrecisionConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class States:
    """Bytes on the heaviest rank, before the first activation."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def stages(model: ModelConfig, layout: LayoutConfig) -> list[list[str]]:
    """The blocks of each pipeline rank, all its virtual stages' together.

    Raises ChoiceError: an impossible pattern, or more stages than blocks.
    """
    pp, vpp = layout.pipeline_parallel or 1, layout.virtual_pipeline_parallel or 1
    every = blocks(model.pattern, model.num_layers)
    segments = split_stages(every, pp * vpp).split("|")
    ranks: list[list[str]] = [[] for _ in range(pp)]
    start = 0
    for index, segment in enumerate(segments):  # segment i is on rank i % pp
        size = 0
        while size < len(segment):
            ranks[index % pp].append(every[start])
            size += len(every[start])
            start += 1
    return ranks


def states(
    model: ModelConfig, precision: PrecisionConfig, layout: LayoutConfig, world_size: int
) -> States | None:
    """The states of the heaviest pipeline rank; None: not estimated (no formula for the model).

    Megatron's mixed precision optimizer keeps an FP32 copy of 16-bit weights and two moments
    (megatron/core/optimizer/distrib_optimizer.py).
    """
    tp, pp, ep = (
        layout.tensor_parallel or 1,
        layout.pipeline_parallel or 1,
        layout.expert_parallel or 1,
    )
    data = max(1, world_size // (tp * pp * (layout.context_parallel or 1)))
    # Optimizer state is sharded over data x context parallel ranks.
    dense_shards = data * (layout.context_parallel or 1)
    expert_shards = max(1, world_size // (tp * pp * ep))
    weight = BYTES[precision.dtype]
    gradient = BYTES[precision.gradients]
    main = 0 if precision.dtype == "fp32" else 4
    optimizer = main + 2 * BYTES[precision.optimizer_moments]
    sharding, strategy = layout.sharding, layout.fsdp_strategy
    shard_optimizer = sharding in ("optimizer", "fsdp", "fsdp2")
    full = sharding == "fsdp2" or (sharding == "fsdp" and strategy == "optim_grads_params")
    shard_gradients = full or (sharding == "fsdp" and strategy == "optim_grads")
    worst: States | None = None
    for rank, stage in enumerate(stages(model, layout)):
        held = per_rank(
            model,
            stage,
            tensor_parallel=tp,
            expert_parallel=ep,
            embedding=rank == 0,
            output=rank == pp - 1,
        )
        if held is None:
            return None

        def spread(each: int, sharded: bool, held: RankParameters = held) -> int:
            if not sharded:
                return each * held.total
            return each * (-(-held.dense // dense_shards) + -(-held.expert // expert_shards))

        found = States(
            weights=spread(weight, full),
            gradients=spread(gradient, shard_gradients),
            optimizer=spread(optimizer, shard_optimizer),
        )
        if worst is None or found.total > worst.total:
            worst = found
    return worst


def checkpoint_bytes(parameters: int, precision: PrecisionConfig) -> int:
    """One checkpoint on disk: weights and optimizer state of all ranks, once each."""
    main = 0 if precision.dtype == "fp32" else 4
    moments = 2 * BYTES[precision.optimizer_moments]
    return parameters * (BYTES[precision.dtype] + main + moments)
