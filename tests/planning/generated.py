"""Choices made at random, for questions that no list of examples can hold.

A choice is a command line: one of each group and a few settings. Half of them have only settings
that people change; the rest also sizes that divide nothing, and values at their limits.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from hypothesis import strategies as st

from launch import compose
from planning.hardware import GPUS
from planning.schema import RunConfig
from tests.choices import GROUPS, combine, line, part

LAYOUT: dict[str, list[Any]] = {
    "tensor_parallel": [1, 2, 4, 8],
    "pipeline_parallel": [1, 2, 4],
    "virtual_pipeline_parallel": [1, 2, 4],
    "context_parallel": [1, 2, 4],
    "expert_parallel": [1, 2, 4, 8],
    "sequence_parallel": [True, False],
    "sharding": ["none", "optimizer", "fsdp", "fsdp2"],
    "fsdp_strategy": ["optim", "optim_grads", "optim_grads_params"],
    "overlap": [True, False],
    "recompute": ["none", "selective", "full"],
    "cuda_graph": ["none", "full"],
    "recompute_layers": [None, 1, 2],
    "recompute_modules": [["core_attn"], ["mlp"], ["moe", "core_attn"], ["layernorm", "moe_act"]],
}
PRECISION: dict[str, list[Any]] = {
    "param_gather": [True, False],
    "gradients": ["fp32", "bf16"],
    "optimizer_moments": ["fp32", "bf16", "fp8"],
    "layers_in_bf16_at_start": [0, 1, "10%"],
    "layers_in_bf16_at_end": [0, 1, 2, "15%"],
}
MODEL: dict[str, list[Any]] = {
    "tied_embeddings": [True, False],
    "qk_norm": [True, False],
    "kv_channels": [None, 64, 128],
    "seq_length": [2048, 8192, 32768],
    "vocab_size": [32000, 151936],
    "experts_per_token": [1, 2],
}
TRAINING: dict[str, list[Any]] = {
    "micro_batch_size": [1, 2, 4],
    "global_batch_size": [64, 128, 256, 768],
    "check_nan": [True, False],
    "optimizer.name": ["adam", "sgd"],
    "optimizer.schedule": ["constant", "linear", "cosine"],
    "eval_interval": [0, 100],
}
OTHERS: dict[str, list[Any]] = {
    "hardware.nodes": [1, 2, 4, 8],
    "hardware.gpus_per_node": [1, 4, 8],
    "hardware.allow_unfused_attention": [True, False],
    "checkpoint.save": [True, False],
    "data.kind": ["mock", "library_text"],
    "data.workers": [0, 2],
    "logging.tensorboard": [True, False],
}
ODD: dict[str, list[Any]] = {
    "layout.tensor_parallel": [3, 5, 16],
    "layout.pipeline_parallel": [3, 5, 8, 16],
    "layout.virtual_pipeline_parallel": [3, 16],
    "layout.context_parallel": [3, 8],
    "layout.expert_parallel": [3, 16],
    "layout.recompute_layers": [3, 5, 100],
    "layout.recompute_modules": [[], ["moe_act"], ["core_atn"], ["shared_experts"]],
    "precision.dtype": ["fp32", "bf16", "fp16"],
    "precision.format": ["none", "fp8", "fp4"],
    "precision.recipe": ["none", "delayed", "current", "blockwise", "mxfp8", "nvfp4"],
    "precision.elements": ["none", "hybrid", "e4m3", "e2m1"],
    "precision.amax_history": [0, 16, 1024],
    "precision.initial_loss_scale": [None, 0.5, 4096.0],
    "precision.layers_in_bf16_at_start": [5, 40, "100%"],
    "precision.layers_in_bf16_at_end": [9, 40, "60%"],
    "model.num_layers": [1, 3, 5, 6, 12],
    "model.hidden_size": [1000, 1536, 4104],
    "model.ffn_hidden_size": [383, 1000, 5632],
    "model.num_attention_heads": [3, 6, 12, 40],
    "model.num_query_groups": [1, 3, 6, 12],
    "model.kv_channels": [31, 36, 100, 256],
    "model.seq_length": [1, 4092, 8190, 8196, 24576],
    "model.vocab_size": [257, 50257],
    "model.pattern": ["*-", "*E", "*-*E", "G-*-", "*"],
    "model.num_experts": [None, 1, 6, 16],
    "model.experts_per_token": [None, 3, 9],
    "model.expert_ffn_hidden_size": [None, 1000, 2048],
    "training.micro_batch_size": [3, 16],
    "training.global_batch_size": [1, 5, 36, 100, 1000],
    "training.train_steps": [1, 2, 620_000],
    "training.eval_steps": [0, 3],
    "training.optimizer.learning_rate": [1e-9, 1.0],
    "training.optimizer.min_learning_rate": [0.0, 1e-5, 0.5],
    "training.optimizer.warmup_steps": [0, 1, 10, 5000, "100%"],
    "training.optimizer.decay_steps": [None, 1, 100],
    "training.optimizer.clip_grad": [0.0],
    "training.optimizer.weight_decay": [0.0],
    "hardware.gpus_per_node": [3, 6, 72],
    "hardware.nodes": [3, 64],
    "checkpoint.interval": [1],
    "logging.interval": [10],
}


def _pairs(*tables: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for table in tables for name, values in table.items() for value in values]


USUAL = _pairs(
    {f"layout.{name}": values for name, values in LAYOUT.items()},
    {f"precision.{name}": values for name, values in PRECISION.items()},
    {f"model.{name}": values for name, values in MODEL.items()},
    {f"training.{name}": values for name, values in TRAINING.items()},
    OTHERS,
)
UNUSUAL = _pairs(ODD)


def _together(*settings: dict[str, Any]) -> list[list[tuple[str, Any]]]:
    return [list(setting.items()) for setting in settings]


# What people set in one breath.
FSDP = ("optim_grads_params", "optim_grads", "optim")
SELECTED = (["mlp"], ["core_attn"], ["moe"], ["moe_act", "layernorm"], ["core_attn", "mlp"])
TOGETHER = _together(
    *(
        {
            "layout.sharding": "fsdp",
            "layout.fsdp_strategy": strategy,
            "layout.overlap": strategy != "optim",
            "model.tied_embeddings": tied,
        }
        for strategy in FSDP
        for tied in (True, False)
    ),
    {
        "layout.sharding": "fsdp2",
        "layout.overlap": False,
        "precision.gradients": "bf16",
        "model.tied_embeddings": False,
    },
    *({"layout.recompute": "selective", "layout.recompute_modules": m} for m in SELECTED),
    *({"layout.recompute": "full", "layout.recompute_layers": n} for n in (None, 1, 3)),
    *({"layout.pipeline_parallel": 2, "layout.virtual_pipeline_parallel": v} for v in (1, 2)),
    *({"layout.tensor_parallel": 2, "layout.sequence_parallel": s} for s in (True, False)),
    {"layout.sharding": "optimizer", "layout.overlap": True},
    {"layout.sharding": "none", "training.optimizer.name": "sgd"},
    {"layout.context_parallel": 2},
    {"layout.cuda_graph": "full"},
    *({"precision.optimizer_moments": m} for m in ("bf16", "fp8")),
)
# ... of a precision that has a format, and of a model that has experts.
QUANTISED = _together(
    *(
        {"precision.param_gather": True, "layout.sharding": sharding, "layout.overlap": True}
        for sharding in ("optimizer", "optimizer", "fsdp")
    ),
    *({"precision.layers_in_bf16_at_end": n} for n in (1, "15%")),
    {"precision.layers_in_bf16_at_start": 1},
    {"precision.gradients": "bf16"},
    {"precision.optimizer_moments": "bf16", "layout.sharding": "optimizer"},
    {
        "precision.optimizer_moments": "fp8",
        "layout.sharding": "optimizer",
        "checkpoint.save": False,
    },
)
EXPERTS = _together(
    *({"layout.expert_parallel": n, "model.experts_per_token": k} for n in (2, 8) for k in (1, 2)),
    {"layout.expert_parallel": 2, "layout.tensor_parallel": 2, "layout.sequence_parallel": True},
)


def replace(choice: Any, setting: str, value: Any) -> Any:
    """`choice` with a setting changed, without a check of its type."""
    name, _, rest = setting.partition(".")
    new = replace(getattr(choice, name), rest, value) if rest else value
    return choice.model_copy(update={name: new})


def build(groups: dict[str, str], settings: list[tuple[str, Any]]) -> RunConfig:
    """The choice of a command line."""
    return reduce(lambda changed, pair: replace(changed, *pair), settings, combine(groups))


def words(groups: dict[str, str], settings: list[tuple[str, Any]]) -> str:
    """The command line itself."""
    return " ".join([line(groups), *(f"{name}={value}" for name, value in settings)])


def _runs(precision: str, hardware: str) -> bool:
    """Whether the card has the format, which half of the choices had better have."""
    gpu = GPUS[part("hardware", hardware).gpu]
    return bool(gpu.supports(part("precision", precision).recipe))


PLACES = [
    (precision, hardware)
    for precision in compose.choices("precision")
    for hardware in compose.choices("hardware")
]


@st.composite
def choices(draw: st.DrawFn) -> tuple[dict[str, str], list[tuple[str, Any]]]:
    """(choice of each group, settings) of a command line; two of five are legal."""
    odd = draw(st.sampled_from([False, False, True]))
    model = draw(st.sampled_from(compose.choices("model")))
    layouts = ["custom", "ddp", *compose.choices("layout")]
    if not part("model", model).num_experts and not odd:
        layouts.remove("ep8")
    layout = draw(st.sampled_from(layouts))
    places = PLACES if odd else [place for place in PLACES if _runs(*place)]
    precision, hardware = draw(st.sampled_from(places))
    groups = dict(zip(GROUPS, (model, precision, layout, hardware), strict=True))
    together = draw(st.lists(st.sampled_from(TOGETHER), max_size=2))
    if part("precision", precision).format != "none":
        together += draw(st.lists(st.sampled_from(QUANTISED), max_size=2))
    if part("model", model).num_experts:
        together += draw(st.lists(st.sampled_from(EXPERTS), max_size=1))
    found = [pair for pairs in together for pair in pairs]
    found += draw(st.lists(st.sampled_from(USUAL), max_size=2))
    if odd:
        found += draw(st.lists(st.sampled_from(UNUSUAL), min_size=1, max_size=2))
    if part("hardware", hardware).gpu == "cpu":
        found.append(("hardware.gpus_per_node", draw(st.sampled_from([4, 8, 32]))))
    elif not odd:
        found.append(("hardware.nodes", draw(st.sampled_from([1, 4]))))
        if part("precision", precision).dtype == "fp32":
            found.append(("hardware.allow_unfused_attention", True))
    return groups, list(dict(found).items())
