"""Recompute of activations."""

from __future__ import annotations

from collections.abc import Iterator

from planning.findings import did_you_mean
from planning.parameters import KNOWN_STACKS
from planning.rules.base import Facts, Verdict, rule

# What layout.recompute_modules may name -> the symbols of the pattern that it recomputes something
# of. Transformer Engine computes the norm before attention and MLP inside the linear layer after
# it, so only the experts' norm is a module (hybrid_layer_specs.py).
RECOMPUTE_MODULES = {"core_attn": "*", "mlp": "-", "moe": "E", "moe_act": "E", "layernorm": "E"}


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


@rule(
    "recompute-mlp-quantised",
    "transformer_layer.py hands Transformer Engine's checkpoint a keyword that it does not know: "
    "the first step ends in an error, seen on an H200",
)
def recompute_mlp_quantised(f: Facts) -> Iterator[Verdict]:
    layout, low = f.layout, f.config.precision.format != "none"
    if layout.recompute == "selective" and "mlp" in layout.recompute_modules and low:
        yield (
            "layout.recompute_modules",
            f"mlp cannot be recomputed in {f.config.precision.format}",
            "take layout.recompute=full, with layout.recompute_layers for a part of the blocks",
        )
