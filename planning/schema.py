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
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        str_min_length=1,
        defer_build=True,
    )


class ModelRecipe(Choice):
    """The training choices that come with a model; conf/training refers to them."""

    micro_batch_size: PositiveInt | None  # None: chosen with the layout (planning/search.py)
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
    initial_loss_scale: PositiveFloat | None  # fp16 only: where dynamic loss scaling starts
    emulate: bool  # compute a format that the hardware lacks in a slower reference

    @property
    def keeps_main_weights_apart(self) -> bool:
        """From the precision-aware optimizer, which holds them itself for other recipes
        (optimizer_config.py, use_precision_aware_optimizer_no_fp8_or_ds_fp8)."""
        return self.format == "fp8" and self.recipe != "delayed"


class LayoutConfig(Choice):
    """`None` in a field: searched (planning/search.py)."""

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
    recompute_layers: PositiveInt | None  # recompute=full: of a stage's blocks the first so many
    recompute_modules: list[str]  # recompute=selective
    cuda_graph: Literal["none", "full"] | None  # full: forward and backward of a step as one graph

    @property
    def shards_optimizer(self) -> bool:
        return self.sharding in ("optimizer", "fsdp", "fsdp2")

    @property
    def shards_gradients(self) -> bool:
        return self.sharding == "fsdp2" or (
            self.sharding == "fsdp" and self.fsdp_strategy != "optim"
        )

    @property
    def shards_weights(self) -> bool:
        return self.sharding == "fsdp2" or (
            self.sharding == "fsdp" and self.fsdp_strategy == "optim_grads_params"
        )


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
    micro_batch_size: PositiveInt | None  # None: chosen with the layout (planning/search.py)
    global_batch_size: PositiveInt
    train_steps: PositiveInt
    eval_interval: NonNegativeInt  # steps; 0: no evaluation
    eval_steps: NonNegativeInt
    seed: PositiveInt
    optimizer: OptimizerConfig
    check_nan: bool

    @property
    def micro_batch(self) -> int:
        """The micro batch size, once it is chosen."""
        assert self.micro_batch_size is not None
        return self.micro_batch_size


class CheckpointConfig(Choice):
    save: bool | str  # true: run_dir/checkpoints; a path; false: none
    interval: PositiveInt  # steps
    keep: PositiveInt  # newest complete checkpoints that stay
    load: str | None  # initial weights from this checkpoint folder, for a new run


class LoggingConfig(Choice):
    interval: PositiveInt  # steps between progress lines in a log
    tensorboard: bool


class LocalLaunch(Choice):
    name: str
    kind: Literal["local"]
    port: NonNegativeInt  # of the rendezvous; 0: a free one


class PlanLaunch(Choice):
    name: str
    kind: Literal["plan"]


class ContainedLaunch(Choice):
    """What container/first_process.py does on each node, wherever it runs."""

    name: str
    kind: str
    # Added to every worker's environment; null: nothing. No secrets: it can be read by many.
    environment: dict[str, str] | None
    preflight: bool  # check each node before training
    min_allreduce_gb_s: PositiveFloat | None  # slower stops the run; None: measured, not judged
    max_restarts: NonNegativeInt  # after a crash, not after an error that would come again


class SageMakerLaunch(ContainedLaunch):
    kind: Literal["sagemaker"]
    dry_run: bool  # write the request and stop: no account, no network
    wait: bool  # follow the job to its end, and submit it again where that helps
    max_parallel: PositiveInt | None  # jobs of a sweep at a time; None: all
    region: str | None  # None: the AWS configuration's
    role: str | None  # ARN of the role that the job runs as
    image: str | None  # URI in ECR, by tag or digest
    bucket: str | None  # S3 bucket of plans, checkpoints and outputs
    prefix: str  # folder in it
    job_name: str | None  # start of the jobs' names; None: the model's
    training_plan: str | None  # ARN of a Flexible Training Plan; None: on demand, or spot
    spot: bool
    max_run_hours: PositiveFloat
    max_wait_hours: PositiveFloat | None  # spot: for capacity and the run; None: twice the run
    max_pending_hours: PositiveFloat | None  # for capacity; None: the service's own limit
    warm_pool_minutes: NonNegativeInt  # instances stay for the next job; billed; 0: none
    internal_retries: NonNegativeInt  # by SageMaker itself, after errors of its own
    stop_before_end_minutes: PositiveInt  # of a training plan's capacity: save and stop by then
    # Name -> s3://bucket/prefix, fsx://fs-0123456789abcdef0/mount/folder or efs://fs-.../folder;
    # a job reads it as data:NAME/...
    channels: dict[str, str] | None
    copy_channels: list[str]  # of S3: copied to each node first; others are read as needed
    run_folder: str | None  # data:NAME/folder on a file system; None: /opt/ml/checkpoints, in S3
    subnets: list[str]
    security_groups: list[str]
    network_isolation: bool
    encrypt_traffic: bool  # between the nodes; EFA does not encrypt, so this costs its speed
    output_kms_key: str | None
    remote_debug: bool  # a shell in the container, through Systems Manager
    health_check: bool  # SageMaker's own, of the instances
    tensorboard_output: bool  # SageMaker's TensorBoard; the run folder has the curves anyway
    tags: dict[str, str] | None


class SlurmLaunch(ContainedLaunch):
    kind: Literal["slurm"]
    image: str | None  # of pyxis/enroot; None: this checkout, at the same path on every node
    mounts: list[str]  # of the image: host:container; the run folder is always one
    partition: str | None
    account: str | None
    qos: str | None
    max_run_hours: PositiveFloat | None  # None: the partition's limit
    options: list[str]  # further ones of sbatch, as they stand


class DockerLaunch(ContainedLaunch):
    kind: Literal["docker"]
    image: str
    mounts: list[str]  # host:container; run folder, cache and local data are always there
    shm_gib: PositiveInt  # shared memory, of the data loaders and NCCL
    options: list[str]  # further ones of docker run, as they stand


class KubernetesLaunch(ContainedLaunch):
    kind: Literal["kubernetes"]
    image: str
    namespace: str
    runtime: str  # ClusterTrainingRuntime of Kubeflow's Trainer
    volume_claim: str  # a volume that every node mounts: runs, cache and data
    mount_path: str  # where, in the container
    node_selector: dict[str, str] | None
    tolerations: list[dict[str, str]]
    annotations: dict[str, str] | None  # of the TrainJob


LaunchConfig = Annotated[
    LocalLaunch | PlanLaunch | SageMakerLaunch | SlurmLaunch | DockerLaunch | KubernetesLaunch,
    Field(discriminator="kind"),
]


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
