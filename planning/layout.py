"""layout=auto: the least sharding whose weights, gradients and optimizer state fit.

Values that the user gave are kept; only what is None is decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from planning.schema import LayoutConfig

# Share of the card that states may take; the rest is for activations, the loss and the context.
STATE_SHARE = 0.75
RECOMPUTE_FROM = 13_000_000_000  # parameters


def _with(layout: LayoutConfig, **values: object) -> LayoutConfig:
    """`layout` with its None fields taken from `values`."""
    given = {name: value for name, value in layout.model_dump().items() if value is not None}
    return LayoutConfig.model_validate(layout.model_dump() | values | given)


def candidates(
    layout: LayoutConfig,
    parameters: int | None,
    world_size: int,
    gpus_per_node: int,
    optimizer: str,
) -> list[LayoutConfig]:
    """Layouts from the least sharding to the most, all complete. optimizer: "adam" or "sgd"."""
    plain = {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "virtual_pipeline_parallel": 1,
        "context_parallel": 1,
        "expert_parallel": 1,
        "sequence_parallel": (layout.tensor_parallel or 1) > 1,
        "sharding": "optimizer" if optimizer == "adam" else "none",
        "overlap": layout.sharding != "fsdp2",  # it overlaps by itself
        # A model of this size outgrows a card with its activations kept (AWS's guide to Blackwell
        # training, 2026: from about 14B).
        "recompute": "full" if (parameters or 0) >= RECOMPUTE_FROM else "none",
        "cuda_graph": "none",
    }
    found = [_with(layout, **plain)]
    if found[0] == layout:
        return found
    if world_size > 1:
        found.append(_with(layout, **(plain | {"sharding": "fsdp"})))
        found += [
            _with(layout, **(plain | {"tensor_parallel": t, "sequence_parallel": True}))
            for t in (2, 4, 8)
            if t <= gpus_per_node
        ]
    return found


def choose(
    found: list[LayoutConfig],
    legal: Callable[[LayoutConfig], bool],
    fits: Callable[[LayoutConfig], bool],
) -> LayoutConfig:
    """The first that is legal and fits; else the one that comes nearest: the last legal one (the
    most sharded, so that the check says what is still short), or the first of all."""
    allowed = [candidate for candidate in found if legal(candidate)]
    return next((candidate for candidate in allowed if fits(candidate)), (allowed or found[:1])[-1])
