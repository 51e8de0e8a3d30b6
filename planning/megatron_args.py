"""Plan -> the argument list of megatron-core 0.19.2, everything explicit.

Nothing here may rely on a Megatron default that decides how a run computes: training/worker.py
refuses to start where a parsed value differs from what stands here.
"""

from __future__ import annotations

from planning.hardware import GPUS, Gpu
from planning.saving import gathers_on_hosts
from planning.schema import (
    CheckpointConfig,
    DataConfig,
    LayoutConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    TrainingConfig,
    amount,
)

RECIPES = {  # ours -> Megatron's --fp8-recipe
    "delayed": "delayed",
    "current": "tensorwise",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
}


def build(
    config: RunConfig,
    *,
    backend: str,
    pattern: str,
    padded_vocab_size: int,
    bf16_symbols: tuple[int, int],
    symbols_per_block: int,
    checkpoint_format: str | None,
) -> list[str]:
    """`bf16_symbols`: layers of the pattern kept in BF16 at the start and at the end."""
    return [
        *_model(config.model, pattern, padded_vocab_size, backend),
        *_backend(backend, config.hardware.allow_unfused_attention),
        *_precision(config.precision, config.layout, bf16_symbols),
        *_layout(config.layout, config.precision, GPUS[config.hardware.gpu or "cpu"]),
        *_recompute(config.layout, symbols_per_block),
        *_graph(config.layout),
        *_training(config.training),
        *_data(config.data, config.model),
        *_checkpoint(config.checkpoint, config.layout, checkpoint_format),
        *_logging(config.logging),
    ]


def _model(model: ModelConfig, pattern: str, padded_vocab_size: int, backend: str) -> list[str]:
    kv_channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    args = [
        "--hybrid-layer-pattern", pattern,
        "--hidden-size", str(model.hidden_size),
        "--ffn-hidden-size", str(model.ffn_hidden_size),
        "--num-attention-heads", str(model.num_attention_heads),
        "--group-query-attention",
        "--num-query-groups", str(model.num_query_groups),
        "--kv-channels", str(kv_channels),
        "--seq-length", str(model.seq_length),
        "--max-position-embeddings", str(model.seq_length),
        "--padded-vocab-size", str(padded_vocab_size),
        "--position-embedding-type", "rope",
        "--rotary-base", str(model.rotary_base),
        "--normalization", "RMSNorm",
        "--norm-epsilon", repr(model.norm_epsilon),
        "--init-method-std", repr(model.init_std),
        "--swiglu",
        "--disable-bias-linear",
        "--attention-dropout", "0.0",
        "--hidden-dropout", "0.0",
    ]  # fmt: skip
    if not model.tied_embeddings:
        args.append("--untie-embeddings-and-output-weights")
    if model.qk_norm:
        args.append("--qk-layernorm")
    if model.num_experts:
        args += [
            "--num-experts", str(model.num_experts),
            "--moe-router-topk", str(model.experts_per_token),
            "--moe-ffn-hidden-size", str(model.expert_ffn_hidden_size),
            "--moe-router-load-balancing-type", "aux_loss",
            "--moe-aux-loss-coeff", repr(float(model.expert_balance_loss or 0.0)),
            "--moe-token-dispatcher-type", "alltoall",
        ]  # fmt: skip
        if model.experts_per_token == 1:
            # A softmax over the one chosen expert would be 1, without a gradient (router.py).
            args.append("--moe-router-pre-softmax")
        if backend == "te":
            args.append("--moe-grouped-gemm")
    return args


def _backend(backend: str, allow_unfused: bool) -> list[str]:
    common = [
        # Fused gradient accumulation needs APEX in the output layer.
        "--no-gradient-accumulation-fusion",
        "--no-create-attention-mask-in-dataloader",
        "--no-bias-gelu-fusion",  # there are no biases
    ]
    if backend == "te":
        return [
            "--transformer-impl", "transformer_engine",
            "--distributed-backend", "nccl",
            # cuDNN's fused attention or nothing; `auto` would fall back to unfused in silence.
            "--attention-backend", "auto" if allow_unfused else "fused",
            "--cross-entropy-loss-fusion",
            "--cross-entropy-fusion-impl", "native",
            *common,
        ]  # fmt: skip
    return [
        "--transformer-impl", "local",
        "--distributed-backend", "gloo",
        "--attention-backend", "unfused",
        "--use-cpu-initialization",
        "--no-masked-softmax-fusion",
        "--no-bias-dropout-fusion",
        "--no-bias-swiglu-fusion",
        "--no-persist-layer-norm",
        "--no-rope-fusion",
        "--no-gradient-reduce-div-fusion",  # gloo has no PREMUL_SUM
        *common,
    ]  # fmt: skip


def _precision(
    precision: PrecisionConfig, layout: LayoutConfig, bf16_symbols: tuple[int, int]
) -> list[str]:
    args = [] if precision.dtype == "fp32" else [f"--{precision.dtype}"]
    if precision.dtype == "fp16":
        # Dynamic loss scaling; all but the start as in Megatron.
        args += [
            "--initial-loss-scale", repr(precision.initial_loss_scale),
            "--min-loss-scale", "1.0",
            "--loss-scale-window", "1000",
            "--hysteresis", "2",
        ]  # fmt: skip
    if precision.dtype != "fp32":
        args.append(
            "--accumulate-allreduce-grads-in-fp32"
            if precision.gradients == "fp32"
            else "--grad-reduce-in-bf16"
        )
    if precision.format == "fp8":
        args += ["--fp8-format", precision.elements, "--fp8-recipe", RECIPES[precision.recipe]]
        if precision.recipe == "delayed":
            args += ["--fp8-amax-history-len", str(precision.amax_history)]
            args += ["--fp8-amax-compute-algo", "max"]
        if precision.recipe == "current":
            # Megatron would turn it off by itself: tensorwise scales of a slice are wrong.
            args.append("--disable-stream-ckpt-dequant")
        if precision.param_gather:
            args.append("--fp8-param-gather")
            if precision.recipe == "mxfp8" and layout.sharding == "optimizer":
                args.append("--reuse-grad-buf-for-mxfp8-param-ag")
    if precision.format == "fp4":
        args += ["--fp4-format", precision.elements, "--fp4-recipe", precision.recipe]
        if precision.param_gather:
            args.append("--fp4-param-gather")
    start, end = bf16_symbols
    if precision.format != "none" and start + end:
        args.append("--first-last-layers-bf16")
    args += ["--num-layers-at-start-in-bf16", str(start), "--num-layers-at-end-in-bf16", str(end)]
    if precision.optimizer_moments != "fp32":
        args += [
            "--use-precision-aware-optimizer",
            "--exp-avg-dtype", precision.optimizer_moments,
            "--exp-avg-sq-dtype", precision.optimizer_moments,
        ]  # fmt: skip
    return args


def _layout(layout: LayoutConfig, precision: PrecisionConfig, gpu: Gpu) -> list[str]:
    args = [
        "--tensor-model-parallel-size", str(layout.tensor_parallel),
        "--pipeline-model-parallel-size", str(layout.pipeline_parallel),
        "--context-parallel-size", str(layout.context_parallel),
        "--expert-model-parallel-size", str(layout.expert_parallel),
        "--expert-tensor-parallel-size", str(layout.tensor_parallel),
    ]  # fmt: skip
    if (layout.context_parallel or 1) > 1:
        args += ["--cp-comm-type", "p2p"]
    if layout.sequence_parallel:
        args.append("--sequence-parallel")
    if (layout.virtual_pipeline_parallel or 1) == 1:
        # Both are of the interleaved schedule.
        args += ["--no-overlap-p2p-communication", "--no-align-param-gather"]
    if layout.sharding in ("optimizer", "fsdp"):
        args.append("--use-distributed-optimizer")
    if layout.sharding == "fsdp":
        args += [
            "--use-megatron-fsdp",
            "--data-parallel-sharding-strategy", layout.fsdp_strategy,
            "--megatron-fsdp-main-params-dtype", "fp32",
            # It does not read --accumulate-allreduce-grads-in-fp32: by itself it would keep the
            # gradients in the parameters' type.
            "--megatron-fsdp-main-grads-dtype", precision.gradients,
            "--megatron-fsdp-grad-comm-dtype", precision.gradients,
        ]  # fmt: skip
    if layout.sharding == "fsdp2":
        args.append("--use-torch-fsdp2")
    if layout.sharding == "fsdp2" or (
        # A CPU passes for Blackwell (training/cpu_standin.py).
        layout.sharding == "fsdp" and (gpu.is_blackwell or gpu.is_cpu)
    ):
        groups = ["dp_cp", "ep_dp"] if (layout.expert_parallel or 1) > 1 else ["dp_cp"]
        args += ["--high-priority-stream-groups", *groups]
    if layout.overlap and layout.sharding in ("optimizer", "fsdp"):
        args += ["--overlap-grad-reduce", "--overlap-param-gather"]
    elif layout.overlap and layout.sharding == "none":
        args.append("--overlap-grad-reduce")
    return args


def _graph(layout: LayoutConfig) -> list[str]:
    if layout.cuda_graph != "full":
        return []
    # Graphs need Transformer Engine's RNG tracker; Megatron would set it by itself.
    return ["--cuda-graph-impl", "full_iteration", "--te-rng-tracker"]


def _recompute(layout: LayoutConfig, symbols_per_block: int) -> list[str]:
    if layout.recompute == "full":
        # All blocks, each as one unit; or the first ones of a stage, each of their layers as one.
        method = "uniform" if layout.recompute_layers is None else "block"
        return [
            "--recompute-granularity", "full",
            "--recompute-method", method,
            "--recompute-num-layers", str((layout.recompute_layers or 1) * symbols_per_block),
        ]  # fmt: skip
    if layout.recompute == "selective":
        modules = layout.recompute_modules
        return ["--recompute-granularity", "selective", "--recompute-modules", *modules]
    return []


def _training(training: TrainingConfig) -> list[str]:
    optimizer = training.optimizer
    decay_steps = optimizer.decay_steps or training.train_steps
    args = [
        "--micro-batch-size", str(training.micro_batch),
        "--global-batch-size", str(training.global_batch_size),
        "--train-iters", str(training.train_steps),
        "--seed", str(training.seed),
        "--optimizer", optimizer.name,
        "--lr", repr(optimizer.learning_rate),
        "--min-lr", repr(optimizer.min_learning_rate),
        "--lr-decay-style", optimizer.schedule,
        "--lr-decay-iters", str(decay_steps),
        "--lr-warmup-iters", str(amount(optimizer.warmup_steps, decay_steps)),
        "--weight-decay", repr(optimizer.weight_decay),
        *_optimizer(optimizer),
        "--clip-grad", repr(optimizer.clip_grad),
        # A resumed run follows the plan's schedule (more steps, another decay), never the old one
        # in silence; with an unchanged plan both are the same.
        "--override-opt-param-scheduler",
        # 0: no evaluation at all, not even after the last step.
        "--eval-iters", str(training.eval_steps if training.eval_interval else 0),
        "--eval-interval", str(training.eval_interval or training.train_steps),
        "--exit-signal-handler",
        "--distributed-timeout-minutes", "30",
        # Its checks wait for the GPU at every bucket of gradients: 2-6% of a step measured on an
        # H200. training/recorder.py looks at the loss and the gradients' norm of each step instead
        # (training.check_nan), which it reads anyway.
        "--no-check-for-nan-in-loss-and-grad",
    ]  # fmt: skip
    return args


def _optimizer(optimizer: OptimizerConfig) -> list[str]:
    if optimizer.name == "sgd":
        return ["--sgd-momentum", repr(optimizer.beta1)]
    return [
        "--adam-beta1", repr(optimizer.beta1),
        "--adam-beta2", repr(optimizer.beta2),
        "--adam-eps", repr(optimizer.epsilon),
    ]  # fmt: skip


def _data(data: DataConfig, model: ModelConfig) -> list[str]:
    args = [
        # Data is tokenised before; Megatron needs only the vocabulary's size.
        "--tokenizer-type", "NullTokenizer",
        "--vocab-size", str(model.vocab_size),
        "--num-workers", str(data.workers),
    ]  # fmt: skip
    if data.kind == "mock":
        args.append("--mock-data")
    return args


def _checkpoint(
    checkpoint: CheckpointConfig, layout: LayoutConfig, format: str | None
) -> list[str]:
    args = ["--async-strategy", "mcore"]  # of asynchronous saves, of which there are none
    if format is not None:
        folder = "run:/checkpoints" if checkpoint.save is True else str(checkpoint.save)
        args += [
            "--save", folder,
            "--load", folder,
            "--save-interval", str(checkpoint.interval),
            "--ckpt-format", format,
        ]  # fmt: skip
        if format == "torch_dist" and layout.sharding == "optimizer":
            args.append("--dist-ckpt-optim-fully-reshardable")
            if gathers_on_hosts(layout):
                args.append("--distrib-optim-fully-reshardable-mem-efficient")
    elif layout.sharding == "fsdp":
        args += ["--ckpt-format", "fsdp_dtensor"]  # Megatron insists on it even without saving
    if checkpoint.load is not None:
        # Weights only; taken when the run's own folder has no checkpoint yet.
        args += ["--pretrained-checkpoint", checkpoint.load]
    return args


def _logging(logging: LoggingConfig) -> list[str]:
    args = ["--log-interval", str(logging.interval)]
    if logging.tensorboard:
        args += ["--tensorboard-dir", "run:/tensorboard", "--tensorboard-log-interval", "1"]
    return args
