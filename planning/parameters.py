"""How many parameters a model has: exact integers, in total, a block and a rank.

The tensors are those that Megatron's layers allocate (0.19.2): SelfAttention and MLP
(megatron/core/transformer), MoELayer with its router, GatedDeltaNet (megatron/core/ssm). RMSNorm,
a gated MLP and no biases, as models/transformer.py builds them; a test compares with built models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planning.findings import ChoiceError, Finding
from planning.formulas import evaluate, fields, head_dim
from planning.pattern import blocks
from planning.schema import ModelConfig

VOCABULARY_MULTIPLE = 128
KNOWN_STACKS = frozenset({"transformer"})
# Gated delta net: Megatron's own default shape, that of Qwen3-Next (transformer_config.py:
# linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim,
# linear_conv_kernel_dim).
GDN_KEY_HEADS, GDN_VALUE_HEADS, GDN_HEAD_DIM, GDN_CONV_KERNEL = 16, 32, 128, 4


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of the whole model. The embedding and output are as allocated."""

    total: int  # with the model's real vocabulary, as models are published
    total_padded: int  # as allocated: with the padded vocabulary
    embedding: int
    output: int  # 0 when tied to the embedding
    per_block: tuple[int, ...]
    final_norm: int
    active_per_token: int  # `total` without the experts that a token is not sent to


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters that one rank holds before any sharding over data parallel ranks.

    `expert` apart: their gradients and optimizer state are sharded over the expert data parallel
    group, world / (expert_tensor_parallel x expert_parallel x pipeline_parallel) ranks.
    """

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class _Layer:
    """One symbol's parameters, by how tensor and expert parallelism divide them."""

    sharded: int = 0  # over tensor parallel ranks
    replicated: int = 0
    expert: int = 0  # all experts; over expert parallel and expert tensor parallel ranks

    @property
    def total(self) -> int:
        return self.sharded + self.replicated + self.expert


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of the embedding table: the next multiple of 128, the same under every layout.

    Megatron by itself pads to 128 x TP, so that checkpoints of two layouts differ in shape.
    """
    return -(-model.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _attention(model: ModelConfig) -> _Layer:
    query = model.num_attention_heads * head_dim(model)
    key_value = 2 * model.num_query_groups * head_dim(model)
    norms = model.hidden_size + (2 * head_dim(model) if model.qk_norm else 0)
    return _Layer(model.hidden_size * (2 * query + key_value), norms)


def _gated_delta_net(model: ModelConfig) -> _Layer:
    key, value = GDN_KEY_HEADS * GDN_HEAD_DIM, GDN_VALUE_HEADS * GDN_HEAD_DIM
    projections = model.hidden_size * (2 * key + 2 * value + 2 * GDN_VALUE_HEADS + value)
    convolution = (2 * key + value) * GDN_CONV_KERNEL
    decay = 2 * GDN_VALUE_HEADS  # dt_bias, A_log
    return _Layer(projections + convolution + decay, model.hidden_size + GDN_HEAD_DIM)


def _mlp(model: ModelConfig) -> _Layer:
    return _Layer(3 * model.hidden_size * model.ffn_hidden_size, model.hidden_size)


def _expert(model: ModelConfig) -> int:
    """Parameters of one expert."""
    return 3 * model.hidden_size * _moe(model)[2]


def _moe(model: ModelConfig) -> tuple[int, int, int]:
    """(experts, experts per token, their ffn_hidden_size). Raises ChoiceError: one is missing."""
    names = ("num_experts", "experts_per_token", "expert_ffn_hidden_size")
    values = [getattr(model, name) for name in names]
    missing = [f"model.{name}" for name, value in zip(names, values, strict=True) if value is None]
    if missing:
        raise ChoiceError(
            Finding(
                "moe-shape",
                "error",
                missing[0],
                f"model.pattern has experts (E), but {', '.join(missing)} is not set",
                "give a number, or use - for a dense MLP",
            )
        )
    experts, active, width = values
    if active > experts:
        raise ChoiceError(
            Finding(
                "moe-shape",
                "error",
                "model.experts_per_token",
                f"{active} experts a token of {experts}",
                f"take at most {experts}",
            )
        )
    return experts, active, width


def _mixture(model: ModelConfig) -> _Layer:
    experts = _moe(model)[0]
    router = experts * model.hidden_size
    return _Layer(0, model.hidden_size + router, experts * _expert(model))


_LAYERS = {"*": _attention, "G": _gated_delta_net, "-": _mlp, "E": _mixture}


def _block(model: ModelConfig, block: str) -> _Layer | None:
    """A block's parameters; None where neither this file nor the model's formulas know them.

    A formula's parameters count as sharded over tensor parallel ranks, as its matrices are.
    """
    if model.formulas is not None:
        setting = "model.formulas.parameters"
        value = evaluate(model.formulas.parameters, fields(model), setting)
        if value.denominator != 1:
            message = f"{model.formulas.parameters!r} gives {float(value)}, no whole number"
            raise ChoiceError(
                Finding("formula", "error", setting, message, "round with // or ceil")
            )
        return _Layer(int(value))
    if model.stack not in KNOWN_STACKS:
        return None
    if unknown := [symbol for symbol in block if symbol not in _LAYERS]:
        raise ChoiceError(
            Finding(
                "pattern",
                "error",
                "model.pattern",
                f"the stack {model.stack} has no layer for {unknown[0]!r}",
                f"it has {' '.join(_LAYERS)}; for another layer see docs/add_a_model.md",
            )
        )
    parts = [_LAYERS[symbol](model) for symbol in block]
    return _Layer(
        sum(part.sharded for part in parts),
        sum(part.replicated for part in parts),
        sum(part.expert for part in parts),
    )


def _blocks(model: ModelConfig, symbols: Sequence[str]) -> list[_Layer] | None:
    known = {block: _block(model, block) for block in set(symbols)}
    found = [known[block] for block in symbols]
    return None if None in found else [layer for layer in found if layer is not None]


def count(model: ModelConfig) -> Parameters | None:
    """The model's parameters; None: not estimated, its stack is unknown and brings no formulas.

    Raises ChoiceError: an impossible pattern or formula, or experts without their shape.
    """
    symbols = blocks(model.pattern, model.num_layers)
    layers = _blocks(model, symbols)
    if layers is None:
        return None
    tables = 1 if model.tied_embeddings else 2
    table = padded_vocab_size(model) * model.hidden_size
    padding = tables * (table - model.vocab_size * model.hidden_size)
    per_block = tuple(layer.total for layer in layers)
    total_padded = tables * table + sum(per_block) + model.hidden_size
    idle = 0
    if model.formulas is None and (mixtures := sum(block.count("E") for block in symbols)):
        experts, active, _ = _moe(model)
        idle = mixtures * (experts - active) * _expert(model)
    return Parameters(
        total=total_padded - padding,
        total_padded=total_padded,
        embedding=table,
        output=(tables - 1) * table,
        per_block=per_block,
        final_norm=model.hidden_size,
        active_per_token=total_padded - padding - idle,
    )


def per_rank(
    model: ModelConfig,
    stage: Sequence[str],
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
    embedding: bool = True,
    output: bool = True,
) -> RankParameters | None:
    """What one rank holds of the blocks `stage` (all its virtual stages' together).

    `embedding`, `output`: whether the rank holds the first and the last stage. Tied embeddings are
    one table where both are, and one each where a pipeline keeps them on different ranks.
    `expert_tensor_parallel`: Megatron's default is tensor_parallel. Divisions round up: the
    heaviest rank. None: not estimated, as in `count`.
    """
    counts = Counter(stage)  # a stage has many blocks and few kinds of them
    layers = _blocks(model, list(counts))
    if layers is None:
        return None
    held = list(zip(layers, counts.values(), strict=True))
    tables = embedding + output
    if model.tied_embeddings and embedding and output:
        tables = 1
    sharded = tables * padded_vocab_size(model) * model.hidden_size
    sharded += sum(layer.sharded * number for layer, number in held)
    replicated = sum(layer.replicated * number for layer, number in held)
    replicated += model.hidden_size if output else 0
    expert_shards = expert_parallel * (expert_tensor_parallel or tensor_parallel)
    return RankParameters(
        dense=-(-sharded // tensor_parallel) + replicated,
        expert=-(-sum(layer.expert * number for layer, number in held) // expert_shards),
    )
