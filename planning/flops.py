"""The floating-point operations of a model, by Megatron's convention.

A multiply and add counts two, causal attention half of the full square, the backward pass twice the
forward pass; embedding, norms, the router of experts and recomputation count nothing
(megatron/training/training.py, num_floating_point_operations; a test compares). Others count full
attention: compare tokens per second with theirs.
"""

from __future__ import annotations

from planning.formulas import evaluate, fields, head_dim
from planning.parameters import (
    GDN_CONV_KERNEL,
    GDN_HEAD_DIM,
    GDN_KEY_HEADS,
    GDN_VALUE_HEADS,
    KNOWN_STACKS,
    padded_vocab_size,
)
from planning.pattern import blocks
from planning.schema import ModelConfig


def _attention(model: ModelConfig) -> float:
    width = model.num_attention_heads * head_dim(model)
    key_value = 2 * model.num_query_groups * head_dim(model)
    return 2 * model.hidden_size * (2 * width + key_value) + 2 * model.seq_length * width


def _gated_delta_net(model: ModelConfig) -> float:
    key, value = GDN_KEY_HEADS * GDN_HEAD_DIM, GDN_VALUE_HEADS * GDN_HEAD_DIM
    projections = model.hidden_size * (2 * key + 2 * value + 2 * GDN_VALUE_HEADS + value)
    convolution = GDN_CONV_KERNEL * (2 * key + value)
    rule = GDN_VALUE_HEADS * GDN_HEAD_DIM**2 * 4
    return 2 * (projections + convolution + rule)


def _mlp(model: ModelConfig) -> float:
    return 6 * model.hidden_size * model.ffn_hidden_size


def _mixture(model: ModelConfig) -> float:
    width = model.expert_ffn_hidden_size or model.ffn_hidden_size
    return 6 * model.hidden_size * width * (model.experts_per_token or 1)


_LAYERS = {"*": _attention, "G": _gated_delta_net, "-": _mlp, "E": _mixture}


def forward_per_token(model: ModelConfig) -> float | None:
    """FLOP of the forward pass per token; None: a stack that is unknown and brings no formula.

    Raises ChoiceError: an impossible pattern or formula.
    """
    head = 2 * model.hidden_size * padded_vocab_size(model)
    if model.formulas is not None:
        setting = "model.formulas.flops"
        block = evaluate(model.formulas.flops, fields(model), setting)
        return float(block) * model.num_layers + head
    symbols = "".join(blocks(model.pattern, model.num_layers))
    if model.stack not in KNOWN_STACKS or not set(symbols) <= set(_LAYERS):
        return None
    layers = {symbol: _LAYERS[symbol](model) for symbol in set(symbols)}
    return sum(layers[symbol] for symbol in symbols) + head


def step(model: ModelConfig, sequences: int) -> float | None:
    """FLOP of one training step of `sequences` sequences, all GPUs' together."""
    forward = forward_per_token(model)
    return None if forward is None else 3 * forward * model.seq_length * sequences
