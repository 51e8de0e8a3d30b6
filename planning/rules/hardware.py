"""What a CPU lacks, and what an instance has."""

from __future__ import annotations

from collections.abc import Iterator

from planning.hardware import INSTANCES, SAME_MEMORY
from planning.rules.base import Facts, Verdict, rule


@rule("cpu-context-parallel", "Megatron's context parallel attention is Transformer Engine's")
def cpu_context_parallel(f: Facts) -> Iterator[Verdict]:
    if f.gpu.is_cpu and f.cp > 1:
        yield (
            "layout.context_parallel",
            f"{f.cp} on a CPU: it needs Transformer Engine's attention",
            "set layout.context_parallel=1, or plan for a GPU (hardware=b200 launch=plan)",
        )


@rule("cpu-fsdp-save", "fsdp_dtensor_checkpoint.py:343 raises for a HybridModel on gloo")
def cpu_fsdp_save(f: Facts) -> Iterator[Verdict]:
    if f.gpu.is_cpu and f.layout.sharding == "fsdp" and f.config.checkpoint.save is not False:
        yield (
            "checkpoint.save",
            "Megatron-FSDP saves as fsdp_dtensor only, which does not work on a CPU",
            "set checkpoint.save=false, or take layout=ddp",
        )


@rule("cpu-fp16", "loss scaling's kernels and FP16 GEMMs are a GPU's")
def cpu_fp16(f: Facts) -> Iterator[Verdict]:
    if f.gpu.is_cpu and f.config.precision.dtype == "fp16":
        yield "precision", "fp16 on a CPU", "take precision=bf16 or fp32"


@rule("cpu-layers", "mamba-ssm and flash-linear-attention have GPU kernels only", of_machine=True)
def cpu_layers(f: Facts) -> Iterator[Verdict]:
    names = {
        "G": "gated delta net (extra `hybrid`, flash-linear-attention)",
        "M": "Mamba (mamba-ssm)",
    }
    for symbol, name in names.items():
        if f.gpu.is_cpu and symbol in f.config.model.pattern:
            yield (
                "model.pattern",
                f"{symbol} is a {name}: its kernels need a GPU",
                "choose the hardware, e.g. hardware=b200 launch=plan, or another model",
            )


@rule("instance", "AWS's instance pages")
def instance(f: Facts) -> Iterator[Verdict]:
    hardware = f.config.hardware
    if hardware.instance_type is None:
        return
    instance = INSTANCES.get(hardware.instance_type)
    if instance is None:
        yield (
            "hardware.instance_type",
            f"{hardware.instance_type} is not known here",
            f"take one of {', '.join(INSTANCES)}",
        )
    elif (instance.gpu, instance.gpus) != (hardware.gpu, hardware.gpus_per_node):
        yield (
            "hardware.instance_type",
            f"{instance.name} has {instance.gpus} {instance.gpu}, not "
            f"{hardware.gpus_per_node} {hardware.gpu}",
            f"set hardware.gpu={instance.gpu} hardware.gpus_per_node={instance.gpus}",
        )


@rule("hardware-figures", "planning/hardware.py", severity="warning")
def hardware_figures(f: Facts) -> Iterator[Verdict]:
    """More than a real machine has: less is a part of it, or a margin."""
    hardware, usual, board = f.config.hardware, f.gpu.memory_gib, f.gpu.node_gpus
    if hardware.name == "this":  # as it was found
        return
    if hardware.memory_gib and usual and hardware.memory_gib > usual * (1 + SAME_MEMORY):
        yield (
            "hardware.memory_gib",
            f"{hardware.memory_gib:g}, and a process has {usual:g} GiB of one {f.gpu.title}: what "
            "the plan makes fit may not fit there",
            f"leave it out (null) for {usual:g}, unless your cards have more",
        )
    count = hardware.gpus_per_node or 1
    if hardware.instance_type is None and board and count > board:
        nodes = -(-count * hardware.nodes // board)
        yield (
            "hardware.gpus_per_node",
            f"{count}, and a node of {f.gpu.title} has {board}: the plan takes all {count} for one "
            "node's",
            f"set hardware.gpus_per_node={board} hardware.nodes={nodes}, unless your machine has "
            "more",
        )
