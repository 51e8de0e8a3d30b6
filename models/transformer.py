"""The Llama family's blocks: `*` attention, `G` gated delta net, `-` MLP, `E` mixture of experts.

Pre-norm with RMSNorm, gated MLP, rotary positions, grouped queries, no biases; QK norm where the
model asks for it. What is normalised, gated or rotated is in the TransformerConfig; here is which
modules compute it.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.gated_delta_net import HAVE_FLA
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from models.backends import InputNorm, LocalNorm
from models.stacks import Backend
from planning.findings import Finding, MachineError
from planning.schema import ModelConfig


def submodules(backend: Backend, model: ModelConfig) -> HybridStackSubmodules:
    """The layers. Raises MachineError: `G` where flash-linear-attention cannot run."""
    if "G" in model.pattern:
        _check_gated_delta_net(backend)
    if backend == "te":
        # Megatron's own. QK norm needs no word here: without one in the spec, SelfAttention takes
        # TENorm where config.qk_layernorm is set.
        return hybrid_stack_spec.submodules
    return HybridStackSubmodules(
        attention_layer=attention_layer(model),
        mlp_layer=mlp_layer(),
        moe_layer=moe_layer(model),
    )


def attention_layer(model: ModelConfig) -> ModuleSpec:
    """`*`, of Megatron's local modules."""
    qk_norm = LocalNorm if model.qk_norm else None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=InputNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=DotProductAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            # Checkpoints carry the names that Transformer Engine's fused modules give.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
            },
        ),
    )


def mlp_layer() -> ModuleSpec:
    """`-`, of Megatron's local modules."""
    return ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=InputNorm,
            mlp=partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                ),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        ),
    )


def moe_layer(model: ModelConfig) -> ModuleSpec:
    """`E`, of Megatron's local modules: the experts run one after the other."""
    return ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=LocalNorm,
            mlp=get_moe_module_spec(use_te=False, num_experts=model.num_experts or 1),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _check_gated_delta_net(backend: Backend) -> None:
    """Raises MachineError where its kernels (flash-linear-attention, GPU only) cannot run."""
    if backend == "torch":
        reason, fix = "its kernels need a GPU and Transformer Engine", "launch=plan works here"
    elif not HAVE_FLA:
        reason, fix = "flash-linear-attention is not installed", "pip install -e '.[hybrid]'"
    elif _wrong_on_hopper():
        reason = f"Triton {version('triton')} computes its gradients wrongly on Hopper GPUs"
        fix = "pip install tilelang, whose kernel flash-linear-attention then takes"
    else:
        return
    raise MachineError(
        Finding(
            "gated-delta-net",
            "error",
            "model.pattern",
            f"the gated delta net (G) cannot run here: {reason}",
            fix,
            "megatron/core/ssm/gated_delta_net/common.py; fla/ops/common/chunk_o.py",
        )
    )


def _wrong_on_hopper() -> bool:
    """flash-linear-attention 0.6 raises in the first backward pass then: say so before it."""
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    broken = IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1
    return bool(broken) and find_spec("tilelang") is None
