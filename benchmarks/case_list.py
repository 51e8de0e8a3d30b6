"""The cases of benchmarks/cases.py: what is varied, each as a choice of launch/train.py.

A case marked `fit` may be used to calibrate the planner's memory and speed models; the others only
judge them.
"""

from __future__ import annotations

from dataclasses import dataclass

COMMON = (
    "hardware=h200 hardware.gpus_per_node=1 layout=ddp data=mock launch=plan checkpoint.save=false "
    "logging.tensorboard=false training.eval_interval=0 training.train_steps=100"
)
MODELS = {
    "1b": "model=gpt_1b",
    "3b": "model=gpt_3b",
    "8b8": "model=llama3_8b model.num_layers=8",
    "8b4": "model=llama3_8b model.num_layers=4",
    "8b": "model=llama3_8b",
    "q8": "model=qwen3_8b model.num_layers=8",
    "32b2": "model=gpt_32b model.num_layers=2",
    "32b4": "model=gpt_32b model.num_layers=4",
    "moe4": "model=moe_8x1b model.num_layers=4",
}
BF16_MOMENTS = "precision.optimizer_moments=bf16"
BF16_GRADIENTS = "precision.gradients=bf16"
GATHER = "precision.param_gather=true"
FULL = "layout.recompute=full"
MLP = "layout.recompute=selective layout.recompute_modules=[mlp]"
ALL_FP8 = "precision.layers_in_bf16_at_start=0 precision.layers_in_bf16_at_end=0"
GRAPH = "layout.cuda_graph=full"


@dataclass(frozen=True)
class Case:
    name: str
    overrides: tuple[str, ...]
    fit: bool


def _case(line: str) -> Case:
    """'1b fp8 2 full: SETTINGS' -> model, precision, micro batch size, a word, settings."""
    head, _, settings = line.partition(":")
    fit = head.startswith("+")
    model, precision, micro, *words = head.lstrip("+").split()
    accumulation = 1 if "single" in words else 2
    overrides = [
        *COMMON.split(),
        *MODELS[model].split(),
        f"precision={precision}",
        f"training.micro_batch_size={micro}",
        f"training.global_batch_size={accumulation * int(micro)}",
        *settings.split(),
    ]
    if "full" in words:
        overrides.append(FULL)
    name = "-".join([model, precision, micro, *words])
    return Case(name, tuple(overrides), fit)


# Most wanted first: a lease may end before the last. `+`: may calibrate.
CASES = [
    _case(line)
    for line in (
        "+1b bf16 1",
        "1b bf16 2",
        "1b bf16 4",
        "+1b fp8 1",
        "1b fp8 4",
        "1b fp8_delayed 1",
        "1b fp8_blockwise 1",
        "+8b8 bf16 1",
        "8b8 bf16 2",
        "8b8 fp8 1",
        "+8b8 fp8 2",
        "8b8 fp8_delayed 2",
        "+8b8 fp8_blockwise 2",
        "1b bf16 1 full",
        "+1b bf16 4 full",
        "1b fp8 4 full",
        "8b8 bf16 2 full",
        "+8b8 fp8 4 full",
        "32b2 bf16 1",
        f"+32b2 fp8 1:{ALL_FP8}",
        f"32b2 fp8 2:{ALL_FP8}",
        "32b4 fp8 1",
        f"3b bf16 1:{BF16_MOMENTS}",
        "3b fp8 1 full",
        "3b bf16 2 full",
        f"1b bf16 1 graph:{GRAPH}",
        f"1b fp8 1 graph:{GRAPH}",
        f"8b8 fp8 1 graph:{GRAPH}",
        f"+1b bf16 2 mlp:{MLP}",
        f"8b8 bf16 2 mlp:{MLP}",
        f"+1b fp8 1 gather:{GATHER}",
        f"1b fp8_delayed 2 gather:{GATHER}",
        f"8b8 fp8 2 gather:{GATHER}",
        f"1b fp8_blockwise 1 gather:{GATHER}",
        "1b bf16 8 s2k:model.seq_length=2048",
        "1b fp8 4 s2k:model.seq_length=2048",
        "+1b bf16 1 s32k:model.seq_length=32768",
        "1b fp8 1 s32k full:model.seq_length=32768",
        "1b bf16 1 s16k:model.seq_length=16384",
        "8b8 bf16 1 s32k full single:model.seq_length=32768",
        "8b8 fp8 4 s2k:model.seq_length=2048",
        "1b bf16 1 untied:model.tied_embeddings=false",
        "1b bf16 2 v32k:model.vocab_size=32000",
        "+1b bf16 1 v152k:model.vocab_size=151936",
        "1b fp8 2 v64k:model.vocab_size=65536",
        f"+1b bf16 1 moments:{BF16_MOMENTS}",
        f"1b bf16 1 gradients:{BF16_GRADIENTS}",
        f"1b bf16 2 lean:{BF16_MOMENTS} {BF16_GRADIENTS}",
        "1b bf16 1 moments8:precision.optimizer_moments=fp8",
        f"8b8 fp8 1 moments:{BF16_MOMENTS}",
        f"8b8 bf16 2 lean:{BF16_MOMENTS} {BF16_GRADIENTS}",
        "q8 bf16 1",
        "q8 fp8 2",
        f"1b bf16 2 part:{FULL} layout.recompute_layers=8",
        f"8b8 fp8 2 part:{FULL} layout.recompute_layers=4",
        "1b bf16 1 replicated:layout=replicated",
        "+1b bf16 1 fsdp:layout=fsdp",
        "1b fp8 2 fsdp:layout=fsdp",
        "8b8 bf16 1 fsdp:layout=fsdp",
        f"1b bf16 1 fsdp2:layout=fsdp2 model.tied_embeddings=false {BF16_GRADIENTS}",
        "+moe4 bf16 1",
        "moe4 bf16 2",
        "moe4 fp8 1",
        "1b bf16 8 full",
        "8b8 bf16 4 full",
        "3b fp8 2 full",
        "8b4 bf16 2",
        "8b4 fp8 4",
        "32b2 bf16 2 full",
        "32b2 bf16 4 s4k:model.seq_length=4096",
        f"8b bf16 1 full single:{BF16_MOMENTS} {BF16_GRADIENTS}",
        "1b fp16 1",
        # These must not fit.
        "1b bf16 8 large",
        "8b8 bf16 8 large",
        "3b bf16 2 large",
        "8b bf16 1 large",
    )
]
