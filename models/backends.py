"""The modules that layers are made of, with Transformer Engine and without."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import (
    LayerNormBuilder,
    LayerNormInterface,
    WrappedTorchNorm,
)

from models.stacks import Backend


class Modules(NamedTuple):
    """One backend's builders, with Megatron's signatures."""

    norm: LayerNormBuilder
    column_parallel_linear: type
    row_parallel_linear: type
    core_attention: type


def modules(backend: Backend) -> Modules:
    """Builders for a layer of one's own, which then computes on a CPU ("torch") and in low
    precision on a GPU ("te")."""
    if backend == "torch":
        return Modules(LocalNorm, ColumnParallelLinear, RowParallelLinear, DotProductAttention)
    te = TESpecProvider()
    return Modules(
        te.layer_norm(),
        te.column_parallel_linear(),
        te.row_parallel_linear(),
        te.core_attention(),
    )


class LocalNorm:
    """torch's norm, with sequence parallelism too.

    WrappedTorchNorm refuses a config with sequence_parallel, though a norm is computed token by
    token and only its weight gradients need a reduction over the ranks that share a sequence.
    Megatron does this for parameters marked `sequence_parallel` (finalize_model_grads.py).

    A class, like Megatron's norms, because build_module hands a function back uncalled.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> LayerNormInterface:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        plain.persist_layer_norm = False  # names a fused kernel, which torch's norm is not
        norm = WrappedTorchNorm(config=plain, hidden_size=hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class LocalHybridStack(HybridStack):
    """Megatron's HybridStack, whose final norm is not Transformer Engine's."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        post_layer_norm: bool = True,
        post_process: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__(
            config, submodules, post_layer_norm=False, post_process=post_process, **arguments
        )
        self.post_layer_norm = post_layer_norm
        if post_process and post_layer_norm:
            self.final_norm = LocalNorm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
