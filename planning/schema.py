"""What a person may choose: the typed, strict form of conf/ and the command line.

Every field has its value in conf/; none has a default here, so that a reader of conf/ has seen
everything. `None` means "decided by resolve", and the comment says how.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 2**63 - 1  # what Megatron and torch count with
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# A number of blocks, or a share of them such as "15%" (rounded up).
Percent = Annotated[str, Field(pattern=r"^(100|\d{1,2})%$")]
BlockCount = NonNegativeInt | Percent
# A number of steps, or a share of the schedule's (rounded down).
StepCount = NonNegativeInt | Percent


def amount(value: int | str, whole: int) -> int:
    """A count as it stands, or a share of `whole` ("15%"), rounded down."""
    return value if isinstance(value, int) else whole * int(value[:-1]) // 100


class Choice(BaseModel):
    """Base of all groups: unknown keys are errors, values are not coerced, nothing mutates."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, str_min_length=1
    )


class ModelRecipe(Choice):
    """The training choices that come with a model; conf/training refers to them."""

    micro_batch_size: PositiveInt
    global_batch_size: PositiveInt
    train_steps: PositiveInt
    learning_rate: PositiveFloat
    warmup_steps: StepCount


class BlockFormulas(Choice):
    """Formulas of a block that this repository does not know, as arithmetic over the model's
    fields (`hidden_size`, `ffn_hidden_size`, `seq_length`, ...); docs/add_a_model.md explains.

    parameters: per block. flops: forward, per token and block. activation_bytes: saved for the
    backward pass, per token and block, BF16, without recompute.
    """

    parameters: str
    flops: str
    activation_bytes: str


class ModelConfig(Choice):
    name: str
    stack: str  # which stack of models/ builds it: a module name under models/
    num_layers: PositiveInt  # transformer blocks
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    kv_channels: PositiveInt | None  # None: hidden_size / num_attention_heads
    vocab_size: PositiveInt  # padded to a multiple of 128, whatever the layout
    seq_length: PositiveInt
    # One period of Megatron's hybrid pattern, e.g. "*-" (attention, MLP); repeated to num_layers.
    pattern: str
    tied_embeddings: bool
    qk_norm: bool
    rotary_base: PositiveInt
    norm_epsilon: PositiveFloat
    init_std: PositiveFloat
    num_experts: PositiveInt | None
    experts_per_token: PositiveInt | None
    expert_ffn_hidden_size: PositiveInt | None
    expert_balance_loss: float | None  # coefficient of the auxiliary load-balancing loss
    formulas: BlockFormulas | None  # only for a stack that planning does not know
    recipe: ModelRecipe


class PrecisionConfig(Choice):
    name: str
    dtype: Literal["fp32", "bf16", "fp16"]  # parameters and activations
    format: Literal["none", "fp8", "fp4"]  # of the linear layers' GEMMs
    recipe: Literal["none", "delayed", "current", "blockwise", "mxfp8", "nvfp4"]
    elements: Literal["none", "hybrid", "e4m3", "e2m1"]
    layers_in_bf16_at_start: BlockCount
    layers_in_bf16_at_end: BlockCount
    param_gather: bool  # keep and gather the weights in the low precision format
    amax_history: NonNegativeInt  # delayed scaling only
    gradients: Literal["fp32", "bf16"]  # accumulation and reduction
    optimizer_moments: Literal["fp32", "bf16", "fp8"]
    emulate: bool  # compute a format that the hardware lacks in a slower reference


class LayoutConfig(Choice):
    """`None` in a field: decided by layout=auto's rule."""

    name: str
    tensor_parallel: PositiveInt | None
    pipeline_parallel: PositiveInt | None
    virtual_pipeline_parallel: PositiveInt | None  # stages per pipeline rank
    context_parallel: PositiveInt | None
    expert_parallel: PositiveInt | None
    sequence_parallel: bool | None
    sharding: Literal["none", "optimizer", "fsdp", "fsdp2"] | None
    fsdp_strategy: Literal["optim", "optim_grads", "optim_grads_params"]  # sharding=fsdp only
    overlap: bool | None  # gradient reduction and parameter gather behind compute
    recompute: Literal["none", "selective", "full"] | None
    recompute_layers: PositiveInt | None  # recompute=full: blocks per recomputed unit
    recompute_modules: list[str]  # recompute=selective


class HardwareConfig(Choice):
    name: str
    gpu: str | None  # a key of planning/hardware.py; None in `this` until it is looked up
    gpus_per_node: PositiveInt | None  # processes per node on a CPU
    nodes: PositiveInt
    instance_type: str | None
    memory_gib: PositiveFloat | None  # None: the card's own (planning/hardware.py)
    allow_unfused_attention: bool
    price_per_node_hour: PositiveFloat | None  # USD; None: not known


class TokenizerConfig(Choice):
    kind: Literal["byte", "huggingface", "sentencepiece", "none"]
    path: str | None
    vocab_size: PositiveInt | None  # kind=none: ids in the data are below it


class DataConfig(Choice):
    name: str
    kind: Literal["library_text", "mock", "indexed"]
    # .bin/.idx prefixes, local or s3://, [weight, prefix] allowed; a flat list
    # `weight, prefix, weight, prefix` too.
    paths: list[str | float | int | list[str | float | int]]
    train_paths: list[str | float | int | list[str | float | int]]
    valid_paths: list[str | float | int | list[str | float | int]]
    test_paths: list[str | float | int | list[str | float | int]]
    split: str | None  # "969,30,1", for `paths`
    tokenizer: TokenizerConfig
    cache: str  # index and library_text cache; a folder
    workers: NonNegativeInt  # loader processes per rank


class OptimizerConfig(Choice):
    name: Literal["adam", "sgd"]
    learning_rate: PositiveFloat
    min_learning_rate: Annotated[float, Field(ge=0)]
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: StepCount
    decay_steps: PositiveInt | None  # None: train_steps
    weight_decay: Annotated[float, Field(ge=0)]
    beta1: Fraction  # SGD: its momentum
    beta2: Fraction  # Adam only
    epsilon: PositiveFloat  # Adam only
    clip_grad: Annotated[float, Field(ge=0)]  # 0: off


class TrainingConfig(Choice):
    micro_batch_size: PositiveInt
    global_batch_size: PositiveInt
    train_steps: PositiveInt
    eval_interval: NonNegativeInt  # steps; 0: no evaluation
    eval_steps: NonNegativeInt
    seed: PositiveInt
    optimizer: OptimizerConfig
    check_nan: bool


class CheckpointConfig(Choice):
    save: bool | str  # true: run_dir/checkpoints; a path; false: none
    interval: PositiveInt  # steps
    keep: PositiveInt  # newest complete checkpoints that stay
    load: str | None  # initial weights from this checkpoint folder, for a new run


class LoggingConfig(Choice):
    interval: PositiveInt  # steps between progress lines in a log
    tensorboard: bool


class LaunchConfig(Choice):
    name: str
    kind: Literal["local", "plan"]
    port: NonNegativeInt  # of the rendezvous; 0: a free one


class RunConfig(Choice):
    """One run, as chosen. Errors: pydantic's ValidationError, translated by launch/compose.py."""

    model: ModelConfig
    precision: PrecisionConfig
    layout: LayoutConfig
    hardware: HardwareConfig
    data: DataConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    launch: LaunchConfig
    run_dir: str | None  # None: runs/<model name>/<time>
    resume: Literal["auto", "none"]
