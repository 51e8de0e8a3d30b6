"""Parallel sizes: which divide what."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from planning.parameters import GDN_KEY_HEADS, padded_vocab_size
from planning.rules.base import Facts, Verdict, divisors, rule


@rule("world-size", "arguments.py validate_args: world size % (TP*PP*CP)")
def world_size(f: Facts) -> Iterator[Verdict]:
    model_size = f.tp * f.pp * f.cp
    if f.world_size % model_size:
        product = "tensor_parallel x pipeline_parallel x context_parallel"
        yield (
            "layout",
            f"{product} = {f.tp} x {f.pp} x {f.cp} = {model_size} does not divide the "
            f"{f.world_size} GPUs or processes of {f.config.hardware.nodes} x "
            f"{f.config.hardware.gpus_per_node} (hardware.nodes x hardware.gpus_per_node)",
            f"take sizes whose product divides {f.world_size}, or hardware.gpus_per_node="
            f"{model_size} if this machine has them",
        )


@rule("tensor-parallel-heads", "transformer_config.py: num_attention_heads % TP")
def tensor_parallel_heads(f: Facts) -> Iterator[Verdict]:
    heads = f.config.model.num_attention_heads
    if heads % f.tp:
        yield (
            "layout.tensor_parallel",
            f"{f.tp} does not divide the {heads} attention heads of {f.config.model.name}",
            f"take {divisors(heads, 8)}",
        )


@rule("tensor-parallel-groups", "transformer_config.py: num_query_groups % TP")
def tensor_parallel_groups(f: Facts) -> Iterator[Verdict]:
    groups = f.config.model.num_query_groups
    if groups % f.tp and f.tp % groups:
        yield (
            "layout.tensor_parallel",
            f"{f.tp} neither divides nor is a multiple of the {groups} query groups "
            f"(model.num_query_groups)",
            f"take {divisors(groups, 8)}",
        )


@rule("tensor-parallel-shapes", "layers.py: divide(size, TP)")
def tensor_parallel_shapes(f: Facts) -> Iterator[Verdict]:
    model = f.config.model
    sizes = {"model.vocab_size": padded_vocab_size(model)}
    if "-" in model.pattern:
        sizes["model.ffn_hidden_size"] = model.ffn_hidden_size
    if "E" in model.pattern and model.expert_ffn_hidden_size:
        sizes["model.expert_ffn_hidden_size"] = model.expert_ffn_hidden_size
    for setting, size in sizes.items():
        if size % f.tp:
            padded = " (padded)" if setting == "model.vocab_size" else ""
            yield (
                setting,
                f"{size}{padded} is not a multiple of layout.tensor_parallel={f.tp}",
                f"take {-(-size // f.tp) * f.tp}, or a tensor_parallel that divides {size}",
            )


@rule("gated-delta-net-heads", "gated_delta_net/common.py: heads are split over TP x CP ranks")
def gated_delta_net_heads(f: Facts) -> Iterator[Verdict]:
    if "G" in f.config.model.pattern and GDN_KEY_HEADS % (f.tp * f.cp):
        yield (
            "layout.tensor_parallel" if f.tp > 1 else "layout.context_parallel",
            f"tensor x context parallel = {f.tp} x {f.cp} does not divide the {GDN_KEY_HEADS} key "
            "heads of the gated delta net (G)",
            f"take sizes whose product divides {GDN_KEY_HEADS}",
        )


@rule("tensor-parallel-node", "a GEMM's all-reduce over EFA is 10x slower than over NVLink")
def tensor_parallel_node(f: Facts) -> Iterator[Verdict]:
    near = f.gpu.nvlink_domain or f.config.hardware.gpus_per_node or 1
    if f.tp > near and not f.gpu.is_cpu:
        yield (
            "layout.tensor_parallel",
            f"{f.tp} ranks are more than the {near} GPUs that NVLink joins",
            f"take at most {near}; add pipeline_parallel or sharding=fsdp for more",
        )


@rule("sequence-parallel", "model_parallel_config.py raises; arguments.py turns it off in silence")
def sequence_parallel(f: Facts) -> Iterator[Verdict]:
    if f.layout.sequence_parallel and f.tp == 1:
        yield (
            "layout.sequence_parallel",
            "it splits the sequence over tensor-parallel ranks, and layout.tensor_parallel=1",
            "set layout.sequence_parallel=false, or layout.tensor_parallel=2 or more",
        )


@rule("moe-sequence-parallel", "moe_layer.py raises in the first training step")
def moe_sequence_parallel(f: Facts) -> Iterator[Verdict]:
    if "E" in f.config.model.pattern and f.tp > 1 and not f.layout.sequence_parallel:
        yield (
            "layout.sequence_parallel",
            f"experts (E) over layout.tensor_parallel={f.tp} need it",
            "set layout.sequence_parallel=true, or layout.tensor_parallel=1",
        )


@rule("sequence-split", "arguments.py: seq_length % (2*CP); SP: each rank's part % TP")
def sequence_split(f: Facts) -> Iterator[Verdict]:
    length = f.config.model.seq_length
    chunks, ranks = 2 if f.cp > 1 else 1, f.tp if f.layout.sequence_parallel else 1
    unit = f.cp * lcm(chunks, ranks)
    if length % unit:
        # Context parallel asks first: it balances two chunks a rank.
        asks = f"context parallel {f.cp}" if length % (f.cp * chunks) else None
        asks = asks or f"sequence parallel over {f.tp} x {f.cp} ranks"
        yield (
            "model.seq_length",
            f"{length} is not a multiple of {unit}, which {asks} asks for",
            f"take {-(-length // unit) * unit}",
        )


@rule("pipeline-depth", "hybrid_layer_allocation.py: every `|` segment holds a layer")
def pipeline_depth(f: Facts) -> Iterator[Verdict]:
    stages = f.pp * f.vpp
    if stages > f.num_blocks:
        yield (
            "layout.pipeline_parallel",
            f"{f.pp} x virtual {f.vpp} = {stages} stages for {f.num_blocks} blocks "
            "(model.num_layers)",
            f"take at most {f.num_blocks} stages",
        )


@rule("virtual-pipeline", "arguments.py: the interleaved schedule needs PP > 1")
def virtual_pipeline(f: Facts) -> Iterator[Verdict]:
    if f.vpp > 1 and f.pp == 1:
        yield (
            "layout.virtual_pipeline_parallel",
            f"{f.vpp} virtual stages, but layout.pipeline_parallel=1",
            "set layout.virtual_pipeline_parallel=1, or layout.pipeline_parallel=2 or more",
        )


@rule("virtual-pipeline-batch", "schedules.py: the interleaved schedule wants micro batches % PP")
def virtual_pipeline_batch(f: Facts) -> Iterator[Verdict]:
    training = f.config.training
    micro = training.global_batch_size // (training.micro_batch * f.data_parallel)
    if f.vpp > 1 and micro % f.pp:
        yield (
            "training.global_batch_size",
            f"{micro} micro batches a step are not a multiple of layout.pipeline_parallel={f.pp}, "
            "as virtual stages need",
            f"take {-(-micro // f.pp) * f.pp * training.micro_batch * f.data_parallel}",
        )


@rule("pipeline-bubble", "1F1B: (PP-1) / (VPP*micro batches + PP-1) idle", severity="warning")
def pipeline_bubble(f: Facts) -> Iterator[Verdict]:
    training = f.config.training
    unit = training.micro_batch * f.data_parallel
    micro = training.global_batch_size // unit
    if f.pp == 1 or micro == 0:
        return
    idle = (f.pp - 1) / (f.vpp * micro + f.pp - 1)
    if idle > 0.3:
        enough = -(-4 * (f.pp - 1) // (f.vpp * f.pp)) * f.pp  # 20% idle or less
        yield (
            "training.global_batch_size",
            f"each of {f.pp} pipeline stages is idle {idle:.0%} of the time, with {micro} micro "
            f"batch{'es' * (micro > 1)} a step",
            f"{enough * unit} would leave it idle "
            f"{(f.pp - 1) / (f.vpp * enough + f.pp - 1):.0%}; or take fewer stages",
        )


@rule("global-batch", "num_microbatches_calculator.py: GBS % (MBS*DP)")
def global_batch(f: Facts) -> Iterator[Verdict]:
    training = f.config.training
    unit = training.micro_batch * f.data_parallel
    if training.global_batch_size % unit:
        below = training.global_batch_size // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        fitting = gcd(training.micro_batch, training.global_batch_size // f.data_parallel)
        if fitting and training.global_batch_size % (fitting * f.data_parallel) == 0:
            near += f", or training.micro_batch_size={fitting}"
        yield (
            "training.global_batch_size",
            f"{training.global_batch_size} is not a multiple of micro_batch_size x data parallel "
            f"= {training.micro_batch} x {f.data_parallel} = {unit}",
            f"take {near}",
        )


@rule("expert-parallel", "arguments.py: EP needs experts, experts % EP == 0, EP divides the ranks")
def expert_parallel(f: Facts) -> Iterator[Verdict]:
    experts = f.config.model.num_experts
    if f.ep > 1 and not experts:
        yield (
            "layout.expert_parallel",
            f"{f.ep}, but {f.config.model.name} has no experts",
            "set layout.expert_parallel=1, or a model with model.num_experts",
        )
    elif f.ep > 1 and (experts or 0) % f.ep:
        yield (
            "layout.expert_parallel",
            f"{f.ep} does not divide the {experts} experts",
            f"take {divisors(experts or 1, 16)}",
        )
    if f.ep > 1 and f.world_size % (f.tp * f.pp * f.ep):
        yield (
            "layout.expert_parallel",
            f"expert x tensor x pipeline = {f.ep * f.tp * f.pp} does not divide {f.world_size} "
            "GPUs",
            "take sizes whose product divides them",
        )
