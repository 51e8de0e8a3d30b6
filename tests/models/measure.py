"""Build models and measure them: a job of test_build.py on stdin, its figures on the last line.

Both are JSON. In a process of its own, because the CPU stand-in changes torch for good.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from training import cpu_standin

cpu_standin.install()

import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid import hybrid_layer_allocation as megatron_pattern
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net import common as gdn_common
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import models
from models.backends import LocalNorm
from models.build import build, stack_spec
from planning.formulas import head_dim
from planning.parameters import padded_vocab_size
from planning.pattern import blocks, split_stages, symbols
from planning.schema import ModelConfig


def transformer_config(m: ModelConfig, **changes: Any) -> TransformerConfig:
    """What training/ makes of the plan's Megatron arguments, for a CPU and in FP32."""
    values: dict[str, Any] = {
        "num_layers": sum(map(len, blocks(m.pattern, m.num_layers))),
        "hidden_size": m.hidden_size,
        "ffn_hidden_size": m.ffn_hidden_size,
        "num_attention_heads": m.num_attention_heads,
        "num_query_groups": m.num_query_groups,
        "kv_channels": head_dim(m),
        "layernorm_epsilon": m.norm_epsilon,
        "init_method_std": m.init_std,
        "normalization": "RMSNorm",
        "qk_layernorm": m.qk_norm,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": m.num_experts,
        "moe_router_topk": m.experts_per_token or 2,
        "moe_ffn_hidden_size": m.expert_ffn_hidden_size,
        "moe_aux_loss_coeff": m.expert_balance_loss or 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**values | changes)


def built(m: ModelConfig, stages: int = 1, **arguments: Any) -> HybridModel:
    changes = arguments.pop("config", {})
    return build(
        m,
        transformer_config(m, **changes),
        padded_vocab_size(m),
        split_stages(blocks(m.pattern, m.num_layers), stages),
        backend="torch",
        **arguments,
    )


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def world(size: int = 1, rank: int = 0, **layout: int) -> Iterator[None]:
    """A process of a world whose other processes do not exist: shapes are real, values are not."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **layout)
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def counts(choices: dict[str, ModelConfig]) -> dict[str, int]:
    """Parameters of each model at its full size, without memory for their values."""
    with world(), torch.device("meta"):
        return {
            name: size(built(choice, config={"perform_initialization": False}))
            for name, choice in choices.items()
        }


def gated_delta_net_count(choice: ModelConfig) -> int:
    """As `counts`. The layer's tensors need no kernel, so they exist without the package too."""
    gdn_common.HAVE_FLA = True
    mixer = GatedDeltaNetSubmodules(ColumnParallelLinear, LocalNorm, RowParallelLinear)
    spec = stack_spec(choice.model_copy(update={"pattern": "*-"}), "torch")
    spec.submodules.gdn_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=LocalNorm,
            self_attention=ModuleSpec(module=GatedDeltaNet, submodules=mixer),
        ),
    )
    config = transformer_config(choice, perform_initialization=False, deterministic_mode=True)
    pattern = symbols(choice.pattern, choice.num_layers)
    with world(), torch.device("meta"):
        return size(
            HybridModel(
                config,
                spec,
                padded_vocab_size(choice),
                choice.seq_length,
                pattern,
                share_embeddings_and_output_weights=choice.tied_embeddings,
            )
        )


def rank_counts(choice: ModelConfig, tp: int, pp: int, ep: int, etp: int) -> list[int]:
    """Parameters of the first and of the last rank."""
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }
    ranks = pp * max(tp, ep * etp)
    config = sizes | {
        "perform_initialization": False,
        "sequence_parallel": tp > 1,
        "pipeline_dtype": torch.float32,
    }
    found = []
    for rank in (0, ranks - 1):
        with world(ranks, rank, **sizes), torch.device("meta"):
            first = parallel_state.is_pipeline_first_stage()
            last = parallel_state.is_pipeline_last_stage()
            part = built(choice, pp, config=config, pre_process=first, post_process=last)
            found.append(size(part))
    return found


def step_flops(m: ModelConfig, sequences: int) -> float:
    """What Megatron's progress line counts for a step of `sequences`."""
    from megatron.training.training import num_floating_point_operations

    args = SimpleNamespace(
        **vars(transformer_config(m)),
        hybrid_layer_pattern=symbols(m.pattern, m.num_layers),
        seq_length=m.seq_length,
        padded_vocab_size=padded_vocab_size(m),
        group_query_attention=True,
        swiglu=True,
    )
    return float(num_floating_point_operations(args, sequences))


def parsed(pattern: str) -> dict[str, Any]:
    """What Megatron reads from a pattern."""
    return {
        "layers": megatron_pattern.get_hybrid_total_layer_count(pattern),
        "segments": megatron_pattern.get_hybrid_total_pipeline_segment_count(pattern),
        "counts": megatron_pattern.get_hybrid_layer_counts(pattern),
        "main": megatron_pattern.parse_hybrid_pattern(pattern).main_pattern,
    }


def refused(pattern: str) -> str | None:
    try:
        megatron_pattern.parse_hybrid_pattern(pattern)
    except ValueError as error:
        return str(error)
    return None


def tokens(m: ModelConfig, sequences: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, m.vocab_size, (sequences, m.seq_length + 1), generator=generator)


def positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def difference_from_transformers(m: ModelConfig, family: str) -> float:
    """Largest difference of a logit between our model and transformers' with the same weights,
    relative to the largest logit."""
    import transformers

    shape = {
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.expert_ffn_hidden_size or m.ffn_hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.num_query_groups,
        "head_dim": head_dim(m),
        "rms_norm_eps": m.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(m.rotary_base)},
        "tie_word_embeddings": m.tied_embeddings,
        "attn_implementation": "eager",
    }
    if m.num_experts:
        shape |= {"num_local_experts": m.num_experts, "num_experts_per_tok": m.experts_per_token}
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**shape)
    )
    with world():
        ours = built(m)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
        theirs.load_state_dict(transformers_state(m, dict(ours.named_parameters())))
        ids = tokens(m)[:, :-1]
        with torch.no_grad():
            logits = ours(ids, positions(ids), None)[..., : m.vocab_size]
            expected = theirs(ids).logits
    return float((logits - expected).abs().max() / expected.abs().max())


def transformers_state(m: ModelConfig, ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's weights under the names and in the shapes of transformers."""
    words = ours["embedding.word_embeddings.weight"]
    output = words if m.tied_embeddings else ours["output_layer.weight"]
    state = {
        "model.embed_tokens.weight": words[: m.vocab_size],
        "lm_head.weight": output[: m.vocab_size],
        "model.norm.weight": ours["decoder.final_norm.weight"],
    }
    group = m.num_attention_heads // m.num_query_groups
    for i in range(m.num_layers):
        mixer, feed_forward = f"decoder.layers.{2 * i}.", f"decoder.layers.{2 * i + 1}."
        attention, to = f"{mixer}self_attention.", f"model.layers.{i}."
        qkv = ours[f"{attention}linear_qkv.weight"]  # a group's queries, its key, its value
        qkv = qkv.view(m.num_query_groups, group + 2, head_dim(m), m.hidden_size)
        for name, part in (("q", qkv[:, :group]), ("k", qkv[:, group]), ("v", qkv[:, group + 1])):
            state[f"{to}self_attn.{name}_proj.weight"] = part.reshape(-1, m.hidden_size)
        state |= {
            f"{to}self_attn.o_proj.weight": ours[f"{attention}linear_proj.weight"],
            f"{to}input_layernorm.weight": ours[f"{mixer}input_layernorm.weight"],
            f"{to}post_attention_layernorm.weight": ours[f"{feed_forward}pre_mlp_layernorm.weight"],
        }
        if m.qk_norm:
            for name in "qk":
                state[f"{to}self_attn.{name}_norm.weight"] = ours[
                    f"{attention}{name}_layernorm.weight"
                ]
        if m.num_experts:
            experts = f"{feed_forward}mlp.experts.local_experts."
            for name, fc in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
                state[f"{to}mlp.experts.{name}"] = torch.stack(
                    [ours[f"{experts}{e}.{fc}.weight"] for e in range(m.num_experts)]
                )
            state[f"{to}mlp.gate.weight"] = ours[f"{feed_forward}mlp.router.weight"]
        else:
            gate, up = ours[f"{feed_forward}mlp.linear_fc1.weight"].chunk(2)
            state[f"{to}mlp.gate_proj.weight"], state[f"{to}mlp.up_proj.weight"] = gate, up
            state[f"{to}mlp.down_proj.weight"] = ours[f"{feed_forward}mlp.linear_fc2.weight"]
    return state


def checkpoint_keys(m: ModelConfig) -> list[str]:
    with world():
        state = built(m).sharded_state_dict()
    return sorted(value.key for value in state.values())


def sequence_parallel_marks(m: ModelConfig) -> dict[str, bool]:
    """Which one-dimensional parameters Megatron will reduce over a sequence's ranks."""
    config = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    with world(2, tensor_model_parallel_size=2):
        parameters = built(m, config=config).named_parameters()
        return {n: getattr(p, "sequence_parallel", False) for n, p in parameters if p.ndim == 1}


def losses(m: ModelConfig, steps: int = 10) -> list[float]:
    """Of a few steps on one batch."""
    with world():
        ours = built(m)
        optimizer = torch.optim.AdamW(ours.parameters(), lr=3e-3)
        ids = tokens(m)
        found = []
        for _ in range(steps):
            loss = ours(ids[:, :-1], positions(ids[:, 1:]), None, labels=ids[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found


def block_figures(m: ModelConfig) -> dict[str, float]:
    """The first block, run forward in BF16: its parameters, FLOPs a token with causal attention
    counted once for each pair (torch counts the masked half too), and the bytes a token that stay
    for the backward pass, where a fused attention's are kept as they are without its matrix."""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # a freed address may come back as another tensor's
        return tensor

    with world():
        ours = built(m, config=recompute).bfloat16()
        weights = {p.untyped_storage().data_ptr() for p in ours.parameters()}
        alive: list[torch.Tensor] = []
        layers = ours.decoder.layers[: len(blocks(m.pattern, m.num_layers)[0])]
        hidden = torch.randn(m.seq_length, 2, m.hidden_size, dtype=torch.bfloat16)
        hidden.requires_grad_()
        rotary = ours.rotary_pos_emb(m.seq_length)
        counter = FlopCounterMode(display=False)
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for layer in layers:
                hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=rotary)
        operations = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
        pairs = sum(n for op, n in operations.items() if "bmm" in op)
        positions = m.seq_length * 2
        return {
            "parameters": sum(size(layer) for layer in layers),
            "flops": (sum(operations.values()) - pairs / 2) / positions,
            "activation_bytes": sum(saved.values()) / positions,
        }


def main() -> None:
    job = json.load(sys.stdin)
    models.__path__.append(job["stacks"])  # models/ of a person who adds one
    choices = {name: ModelConfig(**fields) for name, fields in job["models"].items()}
    figures = {
        "counts": counts({name: choices[name] for name in job["counts"]})
        | {name: gated_delta_net_count(choices[name]) for name in job["gated_delta_nets"]},
        "ranks": {
            case: rank_counts(choices[name], *layout)
            for case, (name, *layout) in job["ranks"].items()
        },
        "flops": {name: step_flops(choices[name], 3) for name in job["flops"]},
        "parsed": {pattern: parsed(pattern) for pattern in job["parsed"]},
        "refused": {pattern: refused(pattern) for pattern in job["refused"]},
        "keys": checkpoint_keys(choices["tiny"]),
        "marks": sequence_parallel_marks(choices["tiny_qwen"]),
        "differences": {
            name: difference_from_transformers(choices[name], family)
            for name, family in job["families"].items()
        },
        "losses": {name: losses(choices[name]) for name in job["losses"]},
        "blocks": {name: block_figures(choices[name]) for name in job["blocks"]},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
