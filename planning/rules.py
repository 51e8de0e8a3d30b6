"""Which choices are legal together: each rule with its reason, its way out and its source.

A rule is a function of the Facts that yields (setting, message, fix); `check` runs them all, so a
person sees every finding at once. Sources name the file of megatron-core 0.19.2 or of Transformer
Engine 2.20 that makes the rule, or the reason where none of them checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal

from planning.findings import Finding, did_you_mean
from planning.formulas import head_dim
from planning.hardware import GPUS, INSTANCES, Gpu
from planning.parameters import (
    GDN_HEAD_DIM,
    GDN_KEY_HEADS,
    GDN_VALUE_HEADS,
    KNOWN_STACKS,
    padded_vocab_size,
)
from planning.pattern import symbols_in_first_blocks, symbols_in_last_blocks
from planning.schema import LayoutConfig, RunConfig, amount

Verdict = tuple[str, str, str]  # setting, message, fix

# What layout.recompute_modules may name -> the symbols of the pattern that it recomputes something
# of. Transformer Engine computes the norm before attention and MLP inside the linear layer after
# it, so only the experts' norm is a module (hybrid_layer_specs.py).
RECOMPUTE_MODULES = {"core_attn": "*", "mlp": "-", "moe": "E", "moe_act": "E", "layernorm": "E"}
# format -> recipes -> elements that are legal with them
FORMATS: dict[str, dict[str, tuple[str, ...]]] = {
    "none": {"none": ("none",)},
    "fp8": {
        "delayed": ("hybrid", "e4m3"),
        "current": ("hybrid", "e4m3"),
        "blockwise": ("hybrid", "e4m3"),
        "mxfp8": ("e4m3",),
    },
    "fp4": {"nvfp4": ("e2m1",)},
}


@dataclass(frozen=True)
class Facts:
    """A choice with its layout completed, and what the rules ask of it."""

    config: RunConfig
    layout: LayoutConfig
    blocks: list[str]  # one string of symbols each (planning/pattern.py)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @cached_property
    def gpu(self) -> Gpu:
        return GPUS[self.config.hardware.gpu or "cpu"]

    @property
    def tp(self) -> int:
        return self.layout.tensor_parallel or 1

    @property
    def pp(self) -> int:
        return self.layout.pipeline_parallel or 1

    @property
    def vpp(self) -> int:
        return self.layout.virtual_pipeline_parallel or 1

    @property
    def cp(self) -> int:
        return self.layout.context_parallel or 1

    @property
    def ep(self) -> int:
        return self.layout.expert_parallel or 1

    @property
    def world_size(self) -> int:
        return (self.config.hardware.gpus_per_node or 1) * self.config.hardware.nodes

    @property
    def data_parallel(self) -> int:
        return max(1, self.world_size // (self.tp * self.pp * self.cp))

    @property
    def bf16_blocks(self) -> tuple[int, int]:
        """Blocks in BF16 at the start and at the end; a share is rounded up."""
        precision, blocks = self.config.precision, self.num_blocks

        def count(value: int | str) -> int:
            return value if isinstance(value, int) else -(-blocks * int(value[:-1]) // 100)

        return count(precision.layers_in_bf16_at_start), count(precision.layers_in_bf16_at_end)


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Literal["error", "warning"]
    source: str
    # Breaking it says that this machine cannot, where the hardware is the one found here.
    of_machine: bool
    verdicts: Callable[[Facts], Iterable[Verdict]]


RULES: list[Rule] = []


def rule(
    id: str,
    source: str,
    *,
    severity: Literal["error", "warning"] = "error",
    of_machine: bool = False,
) -> Callable[[Callable[[Facts], Iterable[Verdict]]], Callable[[Facts], Iterable[Verdict]]]:
    def add(verdicts: Callable[[Facts], Iterable[Verdict]]) -> Callable[[Facts], Iterable[Verdict]]:
        RULES.append(Rule(id, severity, source, of_machine, verdicts))
        return verdicts

    return add


def check(facts: Facts) -> list[Finding]:
    """All findings of all rules."""
    here = facts.config.hardware.name == "this"
    return [
        Finding(r.id, r.severity, setting, message, fix, r.source, r.of_machine and here)
        for r in RULES
        for setting, message, fix in r.verdicts(facts)
    ]


def divisors(number: int, up_to: int = 128) -> str:
    """'1, 2 or 4': what divides `number`, up to `up_to`, for a message."""
    found = [str(n) for n in range(1, min(number, up_to) + 1) if number % n == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


@rule("model-name", "runs/<model.name>/ is the folder of a model's runs")
def model_name(f: Facts) -> Iterator[Verdict]:
    name = f.config.model.name
    if "/" in name or name.startswith("."):
        yield "model.name", f"{name!r} names no folder", "leave out / and a . before it"


# --- parallel sizes ---------------------------------------------------------------------------


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


@rule("heads-groups", "transformer_config.py: num_attention_heads % num_query_groups")
def heads_groups(f: Facts) -> Iterator[Verdict]:
    model = f.config.model
    if model.num_attention_heads % model.num_query_groups:
        yield (
            "model.num_query_groups",
            f"{model.num_query_groups} does not divide model.num_attention_heads="
            f"{model.num_attention_heads}",
            f"take {divisors(model.num_attention_heads)}",
        )


@rule(
    "head-size", "arguments.py: hidden_size % num_attention_heads without kv_channels; RoPE: even"
)
def head_size(f: Facts) -> Iterator[Verdict]:
    model = f.config.model
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield (
            "model.num_attention_heads",
            f"{model.num_attention_heads} does not divide model.hidden_size={model.hidden_size}",
            "take a divisor, or set model.kv_channels",
        )
    elif head_dim(model) % 2 or head_dim(model) == 0:
        yield (
            "model.kv_channels",
            f"a head of {head_dim(model)}: rotary embeddings turn pairs of numbers",
            "set model.kv_channels to an even number",
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
    unit = f.cp * lcm(2 if f.cp > 1 else 1, f.tp if f.layout.sequence_parallel else 1)
    if length % unit:
        yield (
            "model.seq_length",
            f"{length} is not a multiple of {unit}, which context parallel {f.cp} and sequence "
            f"parallel over {f.tp} ranks ask for",
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
    micro = training.global_batch_size // (training.micro_batch_size * f.data_parallel)
    if f.vpp > 1 and micro % f.pp:
        yield (
            "training.global_batch_size",
            f"{micro} micro batches a step are not a multiple of layout.pipeline_parallel={f.pp}, "
            "as virtual stages need",
            f"take {-(-micro // f.pp) * f.pp * training.micro_batch_size * f.data_parallel}",
        )


@rule("pipeline-bubble", "1F1B: (PP-1) / (VPP*micro batches + PP-1) idle", severity="warning")
def pipeline_bubble(f: Facts) -> Iterator[Verdict]:
    training = f.config.training
    unit = training.micro_batch_size * f.data_parallel
    micro = training.global_batch_size // unit
    if f.pp == 1 or micro == 0:
        return
    idle = (f.pp - 1) / (f.vpp * micro + f.pp - 1)
    if idle > 0.3:
        enough = -(-4 * (f.pp - 1) // (f.vpp * f.pp)) * f.pp  # 20% idle or less
        yield (
            "training.global_batch_size",
            f"{micro} micro batches leave each of {f.pp} pipeline stages idle {idle:.0%} of the "
            "time",
            f"{enough * unit} would leave it idle "
            f"{(f.pp - 1) / (f.vpp * enough + f.pp - 1):.0%}; or take fewer stages",
        )


@rule("global-batch", "num_microbatches_calculator.py: GBS % (MBS*DP)")
def global_batch(f: Facts) -> Iterator[Verdict]:
    training = f.config.training
    unit = training.micro_batch_size * f.data_parallel
    if training.global_batch_size % unit:
        below = training.global_batch_size // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        yield (
            "training.global_batch_size",
            f"{training.global_batch_size} is not a multiple of micro_batch_size x data parallel "
            f"= {training.micro_batch_size} x {f.data_parallel} = {unit}",
            f"take {near}, or another training.micro_batch_size",
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


@rule("experts-given", "transformer_config.py; models/transformer.py")
def experts_given(f: Facts) -> Iterator[Verdict]:
    model = f.config.model
    needed: dict[str, float | None] = {
        "model.num_experts": model.num_experts,
        "model.experts_per_token": model.experts_per_token,
        "model.expert_ffn_hidden_size": model.expert_ffn_hidden_size,
    }
    if "E" in model.pattern:
        for setting, value in needed.items():
            if value is None:
                yield setting, f"model.pattern {model.pattern!r} has experts", "set a number"
        if model.num_experts and (model.experts_per_token or 0) > model.num_experts:
            yield (
                "model.experts_per_token",
                f"{model.experts_per_token} of {model.num_experts} experts",
                f"take at most {model.num_experts}",
            )
        if (model.expert_balance_loss or 0) < 0:
            yield (
                "model.expert_balance_loss",
                f"{model.expert_balance_loss} would reward an uneven use of experts",
                "take 0 or more",
            )
        return
    for setting, value in (
        needed | {"model.expert_balance_loss": model.expert_balance_loss}
    ).items():
        if value is not None:
            yield (
                setting,
                f"{value}, but model.pattern {model.pattern!r} has no expert layer",
                f"put E for - in model.pattern, or set {setting}=null",
            )


# --- precision --------------------------------------------------------------------------------


@rule(
    "precision-format", "transformer_config.py; MXFP8 with E5M2 gradients diverged on an 8B model"
)
def precision_format(f: Facts) -> Iterator[Verdict]:
    precision = f.config.precision
    recipes = FORMATS[precision.format]
    if precision.recipe not in recipes:
        yield (
            "precision.recipe",
            f"{precision.recipe} does not go with precision.format={precision.format}",
            f"take {' or '.join(recipes)}",
        )
    elif precision.elements not in recipes[precision.recipe]:
        yield (
            "precision.elements",
            f"{precision.elements} does not go with recipe {precision.recipe}",
            f"take {' or '.join(recipes[precision.recipe])}",
        )


@rule("precision-dtype", "low precision GEMMs are validated with BF16 parameters only")
def precision_dtype(f: Facts) -> Iterator[Verdict]:
    precision = f.config.precision
    if precision.format != "none" and precision.dtype != "bf16":
        yield (
            "precision.dtype",
            f"{precision.dtype} with precision.format={precision.format}",
            "take bf16",
        )
    if precision.gradients == "bf16" and precision.dtype != "bf16":
        yield (
            "precision.gradients",
            f"bf16 with precision.dtype={precision.dtype}",
            "take fp32, or precision.dtype=bf16",
        )


@rule("precision-gpu", "transformer_engine quantization.py: hardware gates", of_machine=True)
def precision_gpu(f: Facts) -> Iterator[Verdict]:
    recipe = f.config.precision.recipe
    if not f.gpu.supports(recipe) and not f.config.precision.emulate:
        able = [name for name, gpu in GPUS.items() if gpu.supports(recipe)]
        where = f"this machine's {f.gpu.title}" if f.config.hardware.name == "this" else f.gpu.title
        yield (
            "precision",
            f"{where} cannot compute {f.config.precision.name}; {', '.join(able)} can",
            f"choose the hardware, e.g. hardware={able[-1]} launch=plan, or precision=bf16 here",
        )


@rule("precision-emulate", "no reference path of these formats trains yet")
def precision_emulate(f: Facts) -> Iterator[Verdict]:
    if f.config.precision.emulate:
        yield "precision.emulate", "no format can be emulated yet", "set precision.emulate=false"


@rule(
    "bf16-blocks", "transformer_config.py: delayed scaling takes no BF16 layers; bounds (fp4: ours)"
)
def bf16_blocks(f: Facts) -> Iterator[Verdict]:
    precision = f.config.precision
    start, end = f.bf16_blocks
    if precision.format == "none" and start + end:
        yield (
            "precision.layers_in_bf16_at_start",
            f"no block is in low precision with precision.format=none, so {start + end} in BF16 "
            "mean nothing",
            "set both layers_in_bf16 to 0",
        )
    elif precision.recipe == "delayed" and start + end:
        yield (
            "precision.layers_in_bf16_at_start",
            "Megatron's delayed scaling cannot leave blocks in BF16",
            "set both layers_in_bf16 to 0, or take precision=fp8 (current scaling)",
        )
    elif start + end >= f.num_blocks and precision.format != "none":
        yield (
            "precision.layers_in_bf16_at_end",
            f"{start} + {end} blocks in BF16 leave none of {f.num_blocks} in {precision.format}",
            "take fewer",
        )
    elif precision.format == "fp8":
        # Megatron counts layers, symbols of the pattern.
        stage = sum(map(len, f.blocks)) // f.pp
        for where, layers in (
            ("start", symbols_in_first_blocks(f.blocks, start)),
            ("end", symbols_in_last_blocks(f.blocks, end)),
        ):
            if layers > stage:
                yield (
                    f"precision.layers_in_bf16_at_{where}",
                    f"{start if where == 'start' else end} blocks in BF16 at the {where} are more "
                    f"than a pipeline stage holds ({f.num_blocks} blocks on {f.pp} stages)",
                    f"take at most {f.num_blocks // f.pp}",
                )


@rule("amax-history", "only delayed scaling keeps a history (transformer_engine DelayedScaling)")
def amax_history(f: Facts) -> Iterator[Verdict]:
    precision = f.config.precision
    delayed = precision.recipe == "delayed"
    if delayed != (precision.amax_history > 0):
        yield (
            "precision.amax_history",
            f"{precision.amax_history} with precision.recipe={precision.recipe}",
            "take 1024 (steps)" if delayed else "set precision.amax_history=0",
        )


@rule("fp16-nan", "arguments.py turns the check off under loss scaling", severity="warning")
def fp16_nan(f: Facts) -> Iterator[Verdict]:
    if f.config.precision.dtype == "fp16" and f.config.training.check_nan:
        yield (
            "training.check_nan",
            "under FP16's loss scaling a gradient that is not finite lowers the scale and skips "
            "the step; it does not stop the run",
            "training.check_nan=false says so",
        )


@rule(
    "param-gather", "arguments.py: fp8_param_gather needs a sharded optimizer; FSDP2 turns it off"
)
def param_gather(f: Facts) -> Iterator[Verdict]:
    precision = f.config.precision
    if not precision.param_gather:
        return
    if precision.format == "none":
        yield (
            "precision.param_gather",
            "there is no low precision format to gather weights in",
            "set precision.param_gather=false, or take precision=fp8",
        )
    elif f.layout.sharding not in ("optimizer", "fsdp"):
        yield (
            "precision.param_gather",
            f"it works with layout.sharding=optimizer or fsdp, not {f.layout.sharding}",
            "set precision.param_gather=false, or layout=ddp or fsdp",
        )
    elif precision.recipe == "mxfp8" and f.layout.sharding == "optimizer" and not f.layout.overlap:
        yield (
            "layout.overlap",
            "MXFP8 weights share the gradient buffer: without both overlaps the loss turned to NaN",
            "set layout.overlap=true, or precision.param_gather=false",
        )


@rule("nvfp4-sharding", "NVIDIA's NVFP4 layouts are DDP, TP and PP; FSDP is unproven there")
def nvfp4_sharding(f: Facts) -> Iterator[Verdict]:
    sharding = f.layout.sharding
    if f.config.precision.format == "fp4" and sharding in ("fsdp", "fsdp2"):
        yield (
            "layout.sharding",
            f"NVFP4 with {sharding} is not proven to train",
            "take layout=ddp, tp2, tp4, tp8 or tp2_pp4, or precision=mxfp8",
        )


@rule("nvfp4-context-parallel", "NaN was reported with CP 2", severity="warning")
def nvfp4_context_parallel(f: Facts) -> Iterator[Verdict]:
    if f.config.precision.format == "fp4" and f.cp > 1:
        yield (
            "layout.context_parallel",
            f"NVFP4 with context parallel {f.cp} is not proven to train",
            "compare its first losses with layout.context_parallel=1",
        )


@rule(
    "fused-attention",
    "transformer_engine dot_product_attention/utils.py: FusedAttention takes BF16 and FP16; cuDNN "
    "head sizes in eights",
)
def fused_attention(f: Facts) -> Iterator[Verdict]:
    model = f.config.model
    if f.gpu.is_cpu or f.config.hardware.allow_unfused_attention or "*" not in model.pattern:
        return
    unfused = "or hardware.allow_unfused_attention=true (slow, and memory grows with seq_length^2)"
    if f.config.precision.dtype == "fp32":
        yield "precision.dtype", "no fused attention in fp32 on a GPU", f"take bf16, {unfused}"
    if head_dim(model) % 8:
        yield (
            "model.kv_channels",
            f"no fused attention for heads of {head_dim(model)}",
            f"take a multiple of 8, {unfused}",
        )


@rule("quantised-shapes", "TE: FP8 dims 8 x 16, MXFP8 32 x 32, NVFP4 16 x 16, after all splits")
def quantised_shapes(f: Facts) -> Iterator[Verdict]:
    precision, model = f.config.precision, f.config.model
    if precision.format == "none":
        return
    rows, columns = {"mxfp8": (32, 32), "nvfp4": (16, 16)}.get(precision.recipe, (8, 16))
    split = f.cp * (f.tp if f.layout.sequence_parallel else 1)
    tokens = model.seq_length * f.config.training.micro_batch_size
    if tokens % split == 0 and (tokens // split) % rows:
        unit = rows * split
        yield (
            "model.seq_length",
            f"{tokens} tokens of a micro batch over {split} ranks are {tokens // split} each, not "
            f"a multiple of {rows} as {precision.recipe} needs",
            f"take a sequence length that is a multiple of {unit}",
        )
    for setting, what, size, parts in _linear_layers(f):
        if size % parts == 0 and (size // parts) % columns:
            yield (
                setting,
                f"{what}: {size // parts} a rank is not a multiple of {columns} as "
                f"{precision.recipe} needs",
                f"take a size of which each rank holds a multiple of {columns}"
                + (", or a smaller layout.tensor_parallel" if f.tp > 1 else ""),
            )


def _linear_layers(f: Facts) -> Iterator[tuple[str, str, int, int]]:
    """(setting, what, size, ranks that share it) of the inputs and outputs of the linear layers."""
    model = f.config.model
    yield "model.hidden_size", "hidden size", model.hidden_size, 1
    if "*" in model.pattern:
        groups = max(model.num_query_groups, f.tp)  # a rank holds one at least
        query, key_value = model.num_attention_heads * head_dim(model), 2 * groups * head_dim(model)
        yield "model.kv_channels", "queries", query, f.tp
        yield "model.num_query_groups", "keys and values", key_value, f.tp
    if "-" in model.pattern:
        yield "model.ffn_hidden_size", "MLP", model.ffn_hidden_size, f.tp
    if "E" in model.pattern and model.expert_ffn_hidden_size:
        yield "model.expert_ffn_hidden_size", "expert", model.expert_ffn_hidden_size, f.tp
    if "G" in model.pattern:
        heads = (GDN_KEY_HEADS + GDN_VALUE_HEADS) * GDN_HEAD_DIM + GDN_VALUE_HEADS
        yield "layout.tensor_parallel", "input of the gated delta net", 2 * heads, f.tp


@rule("optimizer-moments", "optimizer_config.py: precision-aware needs Adam and sharded state; TE")
def optimizer_moments(f: Facts) -> Iterator[Verdict]:
    moments = f.config.precision.optimizer_moments
    if moments == "fp32":
        return
    problem = (
        f"layout.sharding={f.layout.sharding}"
        if f.layout.sharding not in ("optimizer", "fsdp")
        else "training.optimizer.name=sgd"
        if f.config.training.optimizer.name != "adam"
        else "a CPU"
        if f.gpu.is_cpu
        else None
    )
    if problem:
        yield (
            "precision.optimizer_moments",
            f"{moments} moments do not work with {problem}",
            "set precision.optimizer_moments=fp32, or use Adam with layout=ddp or fsdp on a GPU",
        )


@rule("low-precision-small", "TE FP8 was slower than BF16 at hidden 1024", severity="warning")
def low_precision_small(f: Facts) -> Iterator[Verdict]:
    if f.config.precision.format != "none" and f.config.model.hidden_size < 2048:
        yield (
            "precision",
            f"at model.hidden_size={f.config.model.hidden_size} quantisation costs more than the "
            "faster GEMMs gain",
            "measure precision=bf16 first",
        )


# --- sharding ---------------------------------------------------------------------------------


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


# --- recompute --------------------------------------------------------------------------------


@rule("recompute", "transformer_config.py: granularity, modules, layers")
def recompute(f: Facts) -> Iterator[Verdict]:
    layout = f.layout
    if layout.recompute != "full" and layout.recompute_layers is not None:
        yield (
            "layout.recompute_layers",
            f"{layout.recompute_layers} means nothing with layout.recompute={layout.recompute}",
            "set layout.recompute_layers=null, or layout.recompute=full",
        )
    stage = f.num_blocks // (f.pp * f.vpp)
    if layout.recompute == "full" and (layout.recompute_layers or 1) > max(1, stage):
        yield (
            "layout.recompute_layers",
            f"{layout.recompute_layers} blocks, and a pipeline stage has {stage}",
            f"take at most {stage}",
        )
    if layout.recompute != "selective":
        if layout.recompute_modules != ["core_attn"]:
            yield (
                "layout.recompute_modules",
                f"{', '.join(layout.recompute_modules) or 'an empty list'} means nothing with "
                f"layout.recompute={layout.recompute}",
                "set layout.recompute=selective, or leave it at [core_attn]",
            )
        return
    if not layout.recompute_modules:
        yield "layout.recompute_modules", "none to recompute", "set [core_attn], or recompute=none"
    for module in layout.recompute_modules:
        if problem := _recompute_problem(f, module):
            yield "layout.recompute_modules", f"{module}: {problem}", _recompute_fix(f, module)


def _recompute_problem(f: Facts, module: str) -> str | None:
    """Why this module of the model cannot be recomputed; None: it can."""
    model, needed = f.config.model, RECOMPUTE_MODULES.get(module)
    if needed is None:
        return f"no module that is recomputed{did_you_mean(module, RECOMPUTE_MODULES)}"
    if model.stack in KNOWN_STACKS and needed not in model.pattern:
        return f"model.pattern {model.pattern!r} has none ({needed})"
    if module in ("layernorm", "moe_act"):
        if f.gpu.is_cpu:
            return "only Transformer Engine's can be recomputed, on a GPU"
        if f.config.precision.recipe == "delayed":
            return "it cannot be recomputed under delayed scaling"
    return None


def _recompute_fix(f: Facts, module: str) -> str:
    able = [name for name in RECOMPUTE_MODULES if _recompute_problem(f, name) is None]
    return f"take of {', '.join(able)}" if able else "set layout.recompute=full or none"


@rule("recompute-attention", "fused attention keeps no scores to save", severity="warning")
def recompute_attention(f: Facts) -> Iterator[Verdict]:
    fused = not f.gpu.is_cpu and not f.config.hardware.allow_unfused_attention
    if f.layout.recompute == "selective" and f.layout.recompute_modules == ["core_attn"] and fused:
        yield (
            "layout.recompute_modules",
            "fused attention keeps no scores, so recomputing core_attn costs time and saves little",
            "take [mlp], or layout.recompute=full, which saves the most",
        )


# --- training, checkpoints --------------------------------------------------------------------


@rule("warmup", "optimizer_param_scheduler.py: lr_warmup_steps < lr_decay_steps")
def warmup(f: Facts) -> Iterator[Verdict]:
    training = f.config.training
    decay = training.optimizer.decay_steps or training.train_steps
    warmup = amount(training.optimizer.warmup_steps, decay)
    if warmup >= decay:
        yield (
            "training.optimizer.warmup_steps",
            f"{warmup} steps of warm-up, and the schedule has {decay}",
            f"take fewer than {decay}, or a share such as 2%",
        )


@rule("learning-rate", "arguments.py: min_lr <= lr")
def learning_rate(f: Facts) -> Iterator[Verdict]:
    optimizer = f.config.training.optimizer
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            "training.optimizer.min_learning_rate",
            f"{optimizer.min_learning_rate} is above learning_rate={optimizer.learning_rate}",
            "take less",
        )
    elif optimizer.schedule == "constant" and optimizer.min_learning_rate:
        yield (
            "training.optimizer.min_learning_rate",
            f"a constant learning rate never falls to {optimizer.min_learning_rate}",
            "set it to 0, or take schedule=cosine or linear",
        )


@rule("unused-data", "a setting that nothing reads")
def unused_data(f: Facts) -> Iterator[Verdict]:
    data, tokenizer = f.config.data, f.config.data.tokenizer
    if data.kind != "indexed":
        given = {
            "data.paths": data.paths,
            "data.train_paths": data.train_paths,
            "data.valid_paths": data.valid_paths,
            "data.test_paths": data.test_paths,
            "data.split": data.split,
        }
        for setting, value in given.items():
            if value:
                yield setting, f"{value} means nothing with data={data.kind}", "take data=indexed"
    if tokenizer.path is not None and tokenizer.kind in ("byte", "none"):
        yield (
            "data.tokenizer.path",
            f"a tokenizer of kind {tokenizer.kind} has no file",
            "set data.tokenizer.kind=huggingface or sentencepiece, or data.tokenizer.path=null",
        )


@rule("tokenizer-vocabulary", "an id beyond the embedding is an invalid read")
def tokenizer_vocabulary(f: Facts) -> Iterator[Verdict]:
    tokens = {"byte": 257}.get(f.config.data.tokenizer.kind, f.config.data.tokenizer.vocab_size)
    if tokens is not None and tokens > f.config.model.vocab_size:
        yield (
            "data.tokenizer",
            f"its {tokens} tokens do not fit model.vocab_size={f.config.model.vocab_size}",
            f"set model.vocab_size={tokens}, or other data",
        )


# --- a CPU ------------------------------------------------------------------------------------


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


# --- hardware ---------------------------------------------------------------------------------


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
