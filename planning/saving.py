"""What it takes to save a run and to go on with it: disk, and memory of a host.

Where data parallel ranks share the optimizer, every rank gathers the whole FP32 state of its part
of the model in its host's memory, to save and to load it, so that any other layout can go on with
it (distrib_optimizer.py, get_parameter_state_dp_zero). The others save what they hold.
"""

from __future__ import annotations

from planning import memory
from planning.findings import Finding
from planning.hardware import GIB, INSTANCES
from planning.rules.base import Facts
from planning.schema import HardwareConfig, LayoutConfig, PrecisionConfig

STATE = 12  # bytes of a parameter: its main weight and two moments, in FP32 however they are held
# Of a node, for what training and the system hold themselves; not measured.
MARGIN = 0.05
BUCKET = 40_000_000  # parameters, at least (distributed_data_parallel.py)


def checkpoint_bytes(parameters: int, precision: PrecisionConfig) -> int:
    """One checkpoint on disk: weights and optimizer state of all ranks, once each."""
    return parameters * (memory.BYTES[precision.dtype] + STATE)


def has_buckets(layout: LayoutConfig) -> bool:
    """Else Megatron reduces the gradients of a virtual stage at once (training.py,
    per_chunk_bucket_sizes), and gathers its optimizer's state at once too."""
    return bool(layout.overlap) and (layout.pipeline_parallel or 1) == 1


def gathers_on_hosts(layout: LayoutConfig) -> bool:
    """Not on the GPU, where FP32 numbers of half a rank's parameters would hardly fit beside what
    is there. On hosts one rank of a data parallel group writes, and the others wait."""
    return not has_buckets(layout) and (layout.virtual_pipeline_parallel or 1) <= 2


def host_bytes(facts: Facts) -> float | None:
    """Of the processes of one node together, more than in training; None: not estimated.

    Held against runs on a CPU (tests/planning/test_saving.py): within 1% for one rank and bucket,
    up to a third too much with several, and never too little.
    """
    if facts.config.checkpoint.save is False or facts.layout.sharding != "optimizer":
        return 0.0
    held = memory.parameters_held(facts)
    if held is None:
        return None
    ranks = facts.data_parallel * facts.cp
    bucket = held / facts.vpp
    if has_buckets(facts.layout):
        largest = facts.config.model.vocab_size * facts.config.model.hidden_size // facts.tp
        bucket = min(held, BUCKET + largest)
    own = STATE / ranks if bucket == held else 2 * STATE / ranks  # the one before is still held
    # A rank's own shards, what it received, and the two joined.
    each = STATE * held + bucket * (own + 2 * 4)
    return each * (facts.config.hardware.gpus_per_node or 1)


def host_gib(hardware: HardwareConfig) -> int | None:
    """Memory of a node; None: not known."""
    instance = INSTANCES.get(hardware.instance_type or "")
    return instance.host_gib if instance else None


def check(needed: float | None, room_gib: float | None, *, here: bool) -> list[Finding]:
    """Whether the host has the bytes that are needed. here: this machine, not a node elsewhere."""
    if needed is None or room_gib is None or needed <= room_gib * GIB * (1 - MARGIN):
        return []
    short = needed > room_gib * GIB
    node = "this machine" if here else "the node"
    instead = "split the weights (layout=fsdp, tp4, tp8), or save nothing: checkpoint.save=false"
    return [
        Finding(
            "host-memory" if short else "host-memory-tight",
            "error" if short else "warning",
            "layout",
            f"to save and to resume, the processes of a node gather the optimizer in "
            f"{needed / GIB:,.0f} GiB of host memory, and {node} has {room_gib:,.0f} GiB"
            + ("" if short else ", with training and the system in it too"),
            instead
            if short
            else f"save once early, with a small checkpoint.interval; or {instead}",
            "distrib_optimizer.py, get_parameter_state_dp_zero",
            machine=here,
        )
    ]


def fits(facts: Facts) -> bool:
    """Whether a node's memory is enough and leaves the margin, as far as that is known."""
    return not check(host_bytes(facts), host_gib(facts.config.hardware), here=False)
