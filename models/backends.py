"""The modules that layers are made of, with Transformer Engine and without."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import LayerNormBuilder

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


class InputNorm(torch.nn.RMSNorm):
    """torch's RMSNorm before a linear layer, which Transformer Engine computes in one module.

    Megatron's WrappedTorchNorm refuses sequence parallelism, though a norm is computed token by
    token: only its weight gradients need a sum over the ranks that share a sequence, and Megatron
    takes that of parameters marked `sequence_parallel` (finalize_model_grads.py).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError("without Transformer Engine the only norm is RMSNorm, gamma around 1")
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class LocalNorm(InputNorm):
    """The same on its own: Transformer Engine's keeps an extra state in checkpoints, so this has
    an empty one under that name, as Megatron's local linear layers do (tensor_parallel/layers.py).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self._register_load_state_dict_pre_hook(
            lambda state, prefix, *_: state.setdefault(f"{prefix}_extra_state")
        )

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None: ...


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
