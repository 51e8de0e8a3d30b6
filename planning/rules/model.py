"""What a model must be, whatever its layout."""

from __future__ import annotations

from collections.abc import Iterator

from planning.formulas import head_dim
from planning.parameters import KNOWN_STACKS
from planning.rules.base import Facts, Verdict, divisors, rule


@rule("model-name", "runs/<model.name>/ is the folder of a model's runs")
def model_name(f: Facts) -> Iterator[Verdict]:
    name = f.config.model.name
    if "/" in name or name.startswith("."):
        yield "model.name", f"{name!r} names no folder", "leave out / and a . before it"


@rule("formulas", "planning/parameters.py counts the layers of these stacks exactly")
def formulas(f: Facts) -> Iterator[Verdict]:
    model = f.config.model
    if model.formulas is not None and model.stack in KNOWN_STACKS:
        yield (
            "model.formulas",
            f"the layers of stack={model.stack} are counted, and formulas would replace that",
            "set it to null, or name your own model.stack (docs/add_a_model.md)",
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
