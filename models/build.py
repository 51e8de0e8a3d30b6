"""A ModelConfig as Megatron's HybridModel."""

from __future__ import annotations

from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from models.backends import LocalHybridStack
from models.stacks import Backend, load
from planning.schema import ModelConfig


def stack_spec(model: ModelConfig, backend: Backend) -> ModuleSpec:
    """The model's stack of layers.

    Raises ChoiceError: no such stack. MachineError: a layer that the backend cannot compute.
    """
    return ModuleSpec(
        module=HybridStack if backend == "te" else LocalHybridStack,
        submodules=load(model.stack).submodules(backend, model),
    )


def build(
    model: ModelConfig,
    config: TransformerConfig,
    padded_vocab_size: int,
    pattern: str,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    *,
    backend: Backend,
) -> HybridModel:
    """The part of the model that this pipeline stage holds.

    `config` is Megatron's (its num_layers counts symbols), `pattern` the full pattern with `|`
    between pipeline segments (planning/pattern.py). Called with token ids [batch, sequence], the
    model gives the loss of each token [batch, sequence] where labels are given, else logits
    [batch, sequence, padded_vocab_size / TP].
    """
    return HybridModel(
        config=config,
        hybrid_stack_spec=stack_spec(model, backend),
        vocab_size=padded_vocab_size,
        max_sequence_length=model.seq_length,
        hybrid_layer_pattern=pattern,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
