"""Formats, recipes, and what may be kept in them."""

from __future__ import annotations

from collections.abc import Iterator

from planning.hardware import GPUS
from planning.pattern import symbols_in_first_blocks, symbols_in_last_blocks
from planning.rules.base import Facts, Verdict, rule

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
    if recipe not in FORMATS[f.config.precision.format]:
        return  # precision-format says so
    if not f.gpu.supports(recipe) and not f.config.precision.emulate:
        able = [name for name, gpu in GPUS.items() if gpu.supports(recipe)]
        where = f"this machine's {f.gpu.title}" if f.config.hardware.name == "this" else f.gpu.title
        yield (
            "precision",
            f"{where} cannot compute {f.config.precision.name}; {', '.join(able)} can",
            f"choose the hardware, e.g. hardware={able[-1]} launch=plan, or precision=bf16 here",
        )


@rule(
    "blockwise-blackwell",
    "transformer_engine grouped_linear.py: block scaling's own GEMMs are of Hopper",
    severity="warning",
)
def blockwise_blackwell(f: Facts) -> Iterator[Verdict]:
    if f.config.precision.recipe == "blockwise" and f.gpu.is_blackwell:
        yield (
            "precision",
            f"{f.gpu.title} computes {f.config.precision.name} through MXFP8, which costs a step "
            "more and is not finer",
            "take precision=mxfp8",
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


@rule("loss-scale", "grad_scaler.py: 0 < min_scale <= initial_scale; min_scale is 1 here")
def loss_scale(f: Facts) -> Iterator[Verdict]:
    scale, dtype = f.config.precision.initial_loss_scale, f.config.precision.dtype
    setting = "precision.initial_loss_scale"
    if dtype != "fp16" and scale is not None:
        yield (
            setting,
            f"{scale:g} means nothing with precision.dtype={dtype}",
            f"set {setting}=null",
        )
    elif dtype == "fp16" and scale is None:
        yield setting, "FP16 gradients vanish without one", "take 65536"
    elif dtype == "fp16" and (scale or 0) < 1:
        yield setting, f"{scale:g} is below the least loss scale, 1", "take 65536"


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
    "param-gather",
    "arguments.py: fp8_param_gather needs a sharded optimizer; NaN: NVIDIA/Megatron-LM#2272",
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
            f"{precision.recipe} weights need layout.sharding=optimizer or fsdp, not "
            f"{f.layout.sharding}",
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
    elif (
        moments == "fp8"
        and f.config.precision.keeps_main_weights_apart
        and f.config.checkpoint.save is not False
    ):
        yield (
            "precision.optimizer_moments",
            # Saved as they lie there (distrib_optimizer.py, _get_main_param_and_optimizer_states).
            f"fp8 moments of precision={f.config.precision.name} are not saved with their scales: "
            "a run that resumes would go on with others",
            "set precision.optimizer_moments=bf16, or checkpoint.save=false",
        )


@rule("fsdp-moments", "fused_adam.py, initialize_state: a second FP32 copy", severity="warning")
def fsdp_moments(f: Facts) -> Iterator[Verdict]:
    moments = f.config.precision.optimizer_moments
    if (
        moments != "fp32"
        and f.layout.sharding == "fsdp"
        and not f.config.precision.keeps_main_weights_apart
    ):
        yield (
            "precision.optimizer_moments",
            f"with fsdp {moments} moments save {'no' if moments == 'bf16' else 'little'} memory: "
            "Transformer Engine's optimizer copies the FP32 weights that Megatron-FSDP holds",
            "set precision.optimizer_moments=fp32, or take layout=ddp",
        )


@rule("fp8-moments", "measured on an H200: benchmarks/memory_model.md", severity="warning")
def fp8_moments(f: Facts) -> Iterator[Verdict]:
    if (
        f.config.precision.optimizer_moments == "fp8"
        and not f.gpu.is_cpu
        and not f.gpu.is_blackwell
    ):
        yield (
            "precision.optimizer_moments",
            f"on {f.gpu.title} fp8 moments take the memory of bf16 ones (Transformer Engine keeps "
            "a transpose of each), and every step copies them to FP32",
            "bf16 is as small and faster",
        )
