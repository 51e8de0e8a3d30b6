"""Sizes that kernels ask for."""

from __future__ import annotations

from collections.abc import Iterator

from planning.formulas import head_dim
from planning.parameters import GDN_HEAD_DIM, GDN_KEY_HEADS, GDN_VALUE_HEADS
from planning.rules.base import Facts, Verdict, rule


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
    tokens = model.seq_length * f.config.training.micro_batch
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
