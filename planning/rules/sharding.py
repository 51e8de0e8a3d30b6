"""Sharding of states, and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator

from planning.rules.base import Facts, Verdict, rule


@rule("fsdp2", "arguments.py validate_args: use_torch_fsdp2")
def fsdp2(f: Facts) -> Iterator[Verdict]:
    if f.layout.sharding != "fsdp2":
        return
    other = "or take layout=fsdp"
    if f.pp > 1:
        yield "layout.pipeline_parallel", f"{f.pp} with fsdp2", f"set it to 1, {other}"
    if f.ep > 1:
        yield "layout.expert_parallel", f"{f.ep} with fsdp2", f"set it to 1, {other}"
    if f.config.model.tied_embeddings:
        yield (
            "layout.sharding",
            f"fsdp2 needs untied embeddings, and {f.config.model.name} ties them",
            f"set model.tied_embeddings=false, {other}",
        )
    if f.config.precision.dtype == "fp16":
        yield "precision.dtype", "fp16 with fsdp2", f"take bf16, {other}"
    if "E" in f.config.model.pattern and f.config.checkpoint.save is not False:
        yield (
            "checkpoint.save",
            "experts (E) cannot be saved under fsdp2 (dist_checkpointing/validation.py)",
            "set checkpoint.save=false, or take layout=ddp",
        )
    if f.layout.overlap:
        yield (
            "layout.overlap",
            "fsdp2 overlaps by itself; Megatron's switches do nothing there",
            "set layout.overlap=false",
        )
    if f.config.precision.dtype == "bf16" and f.config.precision.gradients == "fp32":
        yield (
            "precision.gradients",
            "fsdp2 sums gradients in the parameters' BF16",
            f"set precision.gradients=bf16, {other}",
        )


@rule(
    "fsdp", "arguments.py validate_args: use_megatron_fsdp; strategies with overlap: wrong losses"
)
def fsdp(f: Facts) -> Iterator[Verdict]:
    if f.layout.sharding != "fsdp":
        return
    if f.layout.fsdp_strategy == "optim" and f.layout.overlap:
        yield (
            "layout.fsdp_strategy",
            "optim with overlap gave wrong losses without an error",
            "take optim_grads_params or optim_grads, or layout.overlap=false",
        )
    if f.layout.fsdp_strategy != "optim" and not f.layout.overlap:
        yield (
            "layout.overlap",
            f"Megatron-FSDP always overlaps with {f.layout.fsdp_strategy} "
            "(megatron_fsdp.py turns it on in silence)",
            "set layout.overlap=true, or layout.fsdp_strategy=optim",
        )
    if f.config.model.tied_embeddings and f.pp > 1:
        yield (
            "layout.pipeline_parallel",
            "Megatron-FSDP with tied embeddings on two stages",
            "set model.tied_embeddings=false, or layout.pipeline_parallel=1",
        )


@rule("sgd-sharding", "distrib_optimizer.py: only Adam's state is sharded")
def sgd_sharding(f: Facts) -> Iterator[Verdict]:
    if f.config.training.optimizer.name == "sgd" and f.layout.sharding in ("optimizer", "fsdp"):
        yield (
            "training.optimizer.name",
            f"sgd with layout.sharding={f.layout.sharding}, which shards the state of Adam",
            "take layout=replicated, or training.optimizer.name=adam",
        )


@rule("unused-strategy", "a setting that nothing reads")
def unused_strategy(f: Facts) -> Iterator[Verdict]:
    strategy = f.layout.fsdp_strategy
    if f.layout.sharding != "fsdp" and strategy != "optim_grads_params":
        yield (
            "layout.fsdp_strategy",
            f"{strategy} means nothing with layout.sharding={f.layout.sharding}",
            "take layout.sharding=fsdp, or leave it at optim_grads_params",
        )
