"""Every rule refuses an example, with the setting and a way out, and accepts it once it is changed.

Each example is a command line; the accepted one is legal as a whole, not only for this rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from planning.findings import Finding, errors
from planning.hardware import GPUS
from planning.resolve import resolve
from planning.rules import RULES, Rule
from tests.choices import config


@dataclass(frozen=True)
class Example:
    rule: str
    common: str  # overrides of both
    breaks: str
    passes: str
    setting: str
    says: str  # in the message or the fix

    def __str__(self) -> str:
        return f"{self.rule}: {self.breaks}"


# What Megatron and Transformer Engine refuse and no choice can ask for, so that it needs no rule:
#
#   fp4 together with fp8                     precision.format is one of them
#   layers per virtual stage, uneven stages,  the plan's pattern has its `|` (planning/pattern.py)
#   PP without a split, pipeline_dtype
#   max_position_embeddings < seq_length      the plan gives the same number for both
#   overlap of parameters alone               layout.overlap is both or none
#   optimizer's dtypes without precision-     the plan asks for it where moments are not FP32
#   aware optimizer
#   reuse of MXFP8's gradient buffer without  the plan asks for it with MXFP8 weights, and never
#   FP8 weights, or with Megatron-FSDP        with Megatron-FSDP
#   CUDA_DEVICE_MAX_CONNECTIONS,              planning/environment.py
#   NCCL_GRAPH_REGISTER
#   full recompute without method or layers   the plan gives both
#   fused cross entropy of TE, fused gradient no setting; the plan has the native one, and none
#   accumulation without APEX
#   FP8 output layer, CPU offload, meta       no setting
#   device, nccl_ub, TP overlap, distributed
#   saved activations, graphs of modules,
#   packed sequences, 4over6 of NVFP4
#
# What only the files of an earlier run show, a checkpoint's format or an odd number of ranks, is
# launch/checks.py's.
LLAMA = "model=llama3_8b hardware=b200 layout=custom layout.sharding=optimizer layout.overlap=true"
FULL = "layout.recompute=full"  # llama3_8b fits on one B200
FSDP = "layout.sharding=fsdp"
MOE = "model=moe_8x1b hardware=b200 layout=custom layout.sharding=optimizer layout.overlap=true"
HYBRID = "model=hybrid_1b hardware=b200 layout=ddp"
SELECTIVE = f"{LLAMA} layout.recompute=selective"
CPU = "hardware=cpu"
MBS1 = "training.micro_batch_size=1"
TP2 = "layout.tensor_parallel=2 layout.sequence_parallel=true"

EXAMPLES = [
    Example("model-name", CPU, "model.name=../mine", "model.name=mine", "model.name",
            "leave out /"),
    Example("world-size", f"{LLAMA} {TP2}", "hardware.gpus_per_node=5",
            "hardware.gpus_per_node=4", "layout", "does not divide the 5 GPUs"),
    Example("tensor-parallel-heads", f"{CPU} layout=tp8 hardware.gpus_per_node=8 "
            "training.global_batch_size=16", "model.num_attention_heads=4",
            "model.num_attention_heads=8", "layout.tensor_parallel", "take 1, 2 or 4"),
    Example("tensor-parallel-groups", f"{CPU} layout=tp2 hardware.gpus_per_node=2 "
            "model.num_attention_heads=6 model.kv_channels=32", "model.num_query_groups=3",
            "model.num_query_groups=6", "layout.tensor_parallel", "take 1 or 3"),
    Example("formulas", CPU, "model.formulas.parameters=hidden_size "
            "model.formulas.flops=hidden_size model.formulas.activation_bytes=hidden_size", "",
            "model.formulas", "set it to null"),
    Example("heads-groups", CPU, "model.num_query_groups=3", "model.num_query_groups=2",
            "model.num_query_groups", "take 1, 2 or 4"),
    Example("head-size", f"{CPU} model.num_attention_heads=3 model.num_query_groups=1", "",
            "model.kv_channels=32", "model.num_attention_heads", "model.kv_channels"),
    Example("head-size", CPU, "model.kv_channels=31", "model.kv_channels=32", "model.kv_channels",
            "even number"),
    Example("head-size", CPU, "model.hidden_size=2", "model.hidden_size=8",
            "model.num_attention_heads", "does not divide model.hidden_size=2"),
    Example("tensor-parallel-shapes", f"{CPU} layout=tp2 hardware.gpus_per_node=2",
            "model.ffn_hidden_size=383", "model.ffn_hidden_size=384", "model.ffn_hidden_size",
            "take 384"),
    Example("tensor-parallel-shapes", f"{CPU} layout=tp2 hardware.gpus_per_node=2 model=moe_tiny",
            "model.expert_ffn_hidden_size=191", "model.expert_ffn_hidden_size=192",
            "model.expert_ffn_hidden_size", "take 192"),
    Example("gated-delta-net-heads", f"{HYBRID} hardware.gpus_per_node=3 model.seq_length=8196 "
            "training.global_batch_size=3", "layout.context_parallel=3",
            "layout.context_parallel=1", "layout.context_parallel", "16 key heads"),
    Example("tensor-parallel-node", "model=llama3_70b hardware=h100 layout=tp8_pp4 "
            "layout.recompute=full hardware.nodes=8",
            "layout.tensor_parallel=16 layout.pipeline_parallel=2", "", "layout.tensor_parallel",
            "at most 8"),
    Example("tensor-parallel-node", "model=llama3_8b hardware.nodes=2 layout=tp8",
            "hardware=p5 hardware.gpus_per_node=4 hardware.instance_type=null", "hardware=gb200",
            "layout.tensor_parallel", "more than the 4 GPUs that NVLink joins"),
    Example("sequence-parallel", LLAMA, "layout.sequence_parallel=true",
            "layout.sequence_parallel=false", "layout.sequence_parallel",
            "layout.sequence_parallel=false"),
    Example("moe-sequence-parallel", f"{MOE} layout.tensor_parallel=2",
            "layout.sequence_parallel=false", "layout.sequence_parallel=true",
            "layout.sequence_parallel", "experts (E)"),
    Example("sequence-split", f"{LLAMA} layout.context_parallel=2", "model.seq_length=8190",
            "model.seq_length=8192", "model.seq_length", "take 8192"),
    # Each of 2 ranks holds two chunks of its own sequence, which 2 tensor parallel ranks share.
    Example("sequence-split", f"{LLAMA} layout.context_parallel=2 {TP2}", "model.seq_length=8190",
            "model.seq_length=8188", "model.seq_length", "not a multiple of 4"),
    Example("sequence-split", f"{LLAMA} {TP2}", "model.seq_length=8191", "model.seq_length=8192",
            "model.seq_length", "sequence parallel over 2"),
    Example("pipeline-depth", f"{CPU} layout=pp2 hardware.gpus_per_node=2 "
            "training.global_batch_size=128", "layout.virtual_pipeline_parallel=2",
            "layout.virtual_pipeline_parallel=1", "layout.pipeline_parallel", "at most 2 stages"),
    Example("virtual-pipeline", LLAMA, "layout.virtual_pipeline_parallel=2",
            "layout.virtual_pipeline_parallel=2 layout.pipeline_parallel=2",
            "layout.virtual_pipeline_parallel", "layout.pipeline_parallel=2 or more"),
    Example("virtual-pipeline-batch", f"{LLAMA} layout.pipeline_parallel=4 "
            "layout.virtual_pipeline_parallel=2", "training.global_batch_size=36",
            "training.global_batch_size=40", "training.global_batch_size", "take 40"),
    Example("pipeline-bubble", f"{LLAMA} layout.pipeline_parallel=4",
            "training.global_batch_size=8", "training.global_batch_size=32",
            "training.global_batch_size", "4 pipeline stages is idle 43%"),
    Example("global-batch", LLAMA, "training.global_batch_size=100",
            "training.global_batch_size=104", "training.global_batch_size", "take 96 or 104"),
    Example("expert-parallel", LLAMA, "layout.expert_parallel=2", "layout.expert_parallel=1",
            "layout.expert_parallel", "no experts"),
    Example("expert-parallel", MOE, "layout.expert_parallel=3", "layout.expert_parallel=4",
            "layout.expert_parallel", "take 1, 2, 4 or 8"),
    Example("expert-parallel", f"{MOE} {TP2}", "layout.expert_parallel=8",
            "layout.expert_parallel=4", "layout.expert_parallel", "does not divide 8"),
    Example("experts-given", MOE, "model.num_experts=null", "model.num_experts=8",
            "model.num_experts", "set a number"),
    Example("experts-given", MOE, "model.experts_per_token=9", "model.experts_per_token=8",
            "model.experts_per_token", "at most 8"),
    Example("experts-given", MOE, "model.expert_balance_loss=-0.01", "model.expert_balance_loss=0",
            "model.expert_balance_loss", "uneven"),
    Example("experts-given", LLAMA, "model.num_experts=8", "model.num_experts=null",
            "model.num_experts", "no expert layer"),
    Example("experts-given", LLAMA, "model.expert_balance_loss=0.01", "",
            "model.expert_balance_loss", "model.expert_balance_loss=null"),
    Example("precision-format", f"{LLAMA} precision=mxfp8", "precision.elements=hybrid",
            "precision.elements=e4m3", "precision.elements", "take e4m3"),
    Example("precision-format", f"{LLAMA} precision=fp8", "precision.recipe=nvfp4",
            "precision.recipe=current", "precision.recipe", "take delayed or current"),
    Example("precision-format", LLAMA, "precision.elements=e4m3", "precision.elements=none",
            "precision.elements", "take none"),
    Example("precision-dtype", f"{LLAMA} precision=fp8", "precision.dtype=fp16",
            "precision.dtype=bf16", "precision.dtype", "take bf16"),
    Example("precision-dtype", LLAMA, "precision=fp16 precision.gradients=bf16", "precision=fp16",
            "precision.gradients", "take fp32"),
    Example("precision-gpu", "model=llama3_8b layout=fsdp precision=mxfp8", "hardware=h200",
            "hardware=b200", "precision", "b200, b300, gb200, gb300 can"),
    Example("blockwise-blackwell", "model=llama3_8b layout=fsdp precision=fp8_blockwise",
            "hardware=b200", "hardware=h200", "precision", "precision=mxfp8"),
    Example("precision-emulate", "model=llama3_8b layout=fsdp precision=mxfp8 hardware=b200",
            "precision.emulate=true", "precision.emulate=false", "precision.emulate", "yet"),
    Example("bf16-blocks", LLAMA, "precision.layers_in_bf16_at_end=1", "",
            "precision.layers_in_bf16_at_start", "precision.format=none"),
    Example("bf16-blocks", f"{LLAMA} precision=fp8_delayed", "precision.layers_in_bf16_at_end=1",
            "", "precision.layers_in_bf16_at_start", "precision=fp8 (current scaling)"),
    Example("bf16-blocks", f"{LLAMA} precision=fp8", "precision.layers_in_bf16_at_end=31",
            "precision.layers_in_bf16_at_end=30", "precision.layers_in_bf16_at_end", "take fewer"),
    Example("bf16-blocks", f"{LLAMA} precision=fp8 layout.pipeline_parallel=4",
            'precision.layers_in_bf16_at_end="30%"', 'precision.layers_in_bf16_at_end="25%"',
            "precision.layers_in_bf16_at_end", "take at most 8"),
    Example("bf16-blocks", f"{LLAMA} precision=fp8 layout.pipeline_parallel=4",
            "precision.layers_in_bf16_at_start=9", "precision.layers_in_bf16_at_start=8",
            "precision.layers_in_bf16_at_start", "9 blocks in BF16 at the start"),
    Example("amax-history", f"{LLAMA} precision=fp8", "precision.amax_history=1024", "",
            "precision.amax_history", "precision.amax_history=0"),
    Example("amax-history", f"{LLAMA} precision=fp8_delayed", "precision.amax_history=0", "",
            "precision.amax_history", "take 1024"),
    Example("loss-scale", f"{LLAMA} precision=fp16", "precision.initial_loss_scale=null",
            "precision.initial_loss_scale=65536", "precision.initial_loss_scale", "take 65536"),
    Example("loss-scale", f"{LLAMA} precision=fp16", "precision.initial_loss_scale=0.5",
            "precision.initial_loss_scale=1", "precision.initial_loss_scale", "below the least"),
    Example("loss-scale", LLAMA, "precision.initial_loss_scale=65536", "",
            "precision.initial_loss_scale", "means nothing with precision.dtype=bf16"),
    Example("fp16-nan", f"{LLAMA} precision=fp16", "training.check_nan=true",
            "training.check_nan=false", "training.check_nan", "loss scaling"),
    Example("param-gather", LLAMA, "precision.param_gather=true", "precision.param_gather=false",
            "precision.param_gather", "precision.param_gather=false"),
    Example("param-gather", "model=gpt_1b hardware=b200 precision=fp8 precision.param_gather=true",
            "layout=replicated", "layout=ddp", "precision.param_gather", "layout=ddp or fsdp"),
    Example("param-gather", "model=gpt_1b hardware=b200 precision=nvfp4 "
            "precision.param_gather=true", "layout=replicated", "layout=ddp",
            "precision.param_gather", "nvfp4 weights need"),
    Example("param-gather", f"{LLAMA} precision=mxfp8 precision.param_gather=true",
            "layout.overlap=false", "layout.overlap=true", "layout.overlap", "NaN"),
    Example("nvfp4-sharding", "model=llama3_8b hardware=b200 precision=nvfp4", "layout=fsdp",
            "layout=ddp", "layout.sharding", "precision=mxfp8"),
    Example("nvfp4-context-parallel", f"{LLAMA} precision=nvfp4", "layout.context_parallel=2",
            "layout.context_parallel=1", "layout.context_parallel", "not proven"),
    Example("fused-attention", "model=gpt_1b hardware=h100 layout=ddp", "precision=fp32",
            "precision=fp32 hardware.allow_unfused_attention=true", "precision.dtype",
            "hardware.allow_unfused_attention=true"),
    Example("fused-attention", LLAMA, "model.kv_channels=100", "model.kv_channels=104",
            "model.kv_channels", "a multiple of 8"),
    Example("quantised-shapes", f"{LLAMA} precision=mxfp8 {MBS1}", "model.seq_length=8176",
            "model.seq_length=8192", "model.seq_length", "multiple of 32"),
    # Reported: 31936 tokens over 4 tensor parallel ranks; 4092 tokens of FP8 over 4.
    Example("quantised-shapes", f"{LLAMA} precision=mxfp8 layout=tp4 {MBS1}",
            "model.seq_length=31936",
            "model.seq_length=32000", "model.seq_length", "multiple of 128"),
    Example("quantised-shapes", f"{LLAMA} precision=fp8 layout=tp4 {MBS1}",
            "model.seq_length=4092",
            "model.seq_length=4096", "model.seq_length", "multiple of 32"),
    Example("quantised-shapes", f"{LLAMA} precision=nvfp4", "model.ffn_hidden_size=14344",
            "model.ffn_hidden_size=14352", "model.ffn_hidden_size", "a multiple of 16"),
    Example("quantised-shapes", f"{MOE} precision=fp8", "model.expert_ffn_hidden_size=8184",
            "model.expert_ffn_hidden_size=8192", "model.expert_ffn_hidden_size", "expert: 8184"),
    Example("quantised-shapes", f"{LLAMA} precision=mxfp8 model.num_attention_heads=8 "
            "model.num_query_groups=1", "model.kv_channels=8", "model.kv_channels=16",
            "model.num_query_groups", "keys and values: 16"),
    Example("quantised-shapes", "model=hybrid_1b hardware=b200 precision=fp8", "layout=tp8",
            "layout=tp4", "layout.tensor_parallel", "smaller layout.tensor_parallel"),
    Example("optimizer-moments", "model=gpt_1b hardware=h100 precision.optimizer_moments=bf16",
            "layout=replicated", "layout=ddp", "precision.optimizer_moments", "layout=ddp or fsdp"),
    Example("optimizer-moments", "model=gpt_1b hardware=h100 precision.optimizer_moments=bf16 "
            "layout=ddp", "training.optimizer.name=sgd", "training.optimizer.name=adam",
            "precision.optimizer_moments", "use Adam"),
    Example("optimizer-moments", "model=gpt_1b hardware=b200 layout=ddp precision=fp8",
            "precision.optimizer_moments=fp8",
            "precision.optimizer_moments=fp8 checkpoint.save=false",
            "precision.optimizer_moments", "not saved with their scales"),
    Example("optimizer-moments", "model=gpt_1b hardware=b200 layout=ddp",
            "precision=mxfp8 precision.optimizer_moments=fp8",
            "precision=fp8_delayed precision.optimizer_moments=fp8",
            "precision.optimizer_moments", "checkpoint.save=false"),
    Example("fsdp-moments", "model=gpt_1b hardware=b200 precision.optimizer_moments=bf16",
            "layout=fsdp", "layout=fsdp precision=fp8", "precision.optimizer_moments",
            "save no memory"),
    Example("fp8-moments", "model=gpt_1b layout=ddp precision.optimizer_moments=fp8",
            "hardware=h200", "hardware=b200", "precision.optimizer_moments", "bf16 is as small"),
    Example("optimizer-moments", CPU, "precision.optimizer_moments=bf16", "",
            "precision.optimizer_moments", "a CPU"),
    Example("fsdp2", f"model=llama3_8b layout=fsdp2 precision.gradients=bf16 {FULL}",
            "hardware=h200 layout.pipeline_parallel=2", "hardware=h200", "layout.pipeline_parallel",
            "layout=fsdp"),
    Example("fsdp2", "model=moe_8x1b hardware=h200 layout=fsdp2 precision.gradients=bf16 "
            "model.tied_embeddings=false", "checkpoint.save=true", "checkpoint.save=false",
            "checkpoint.save", "experts (E) cannot be saved"),
    Example("sgd-sharding", "model=gpt_1b hardware=h200 training.optimizer.name=sgd", "layout=ddp",
            "layout=replicated", "training.optimizer.name", "take layout=replicated"),
    # layout=auto knows.
    Example("sgd-sharding", "model=gpt_1b hardware=h200 training.optimizer.name=sgd",
            "layout.sharding=fsdp", "layout=auto", "training.optimizer.name", "Adam"),
    Example("fsdp2", "model=moe_8x1b hardware=h200 layout=fsdp2 precision.gradients=bf16 "
            "model.tied_embeddings=false checkpoint.save=false", "layout.expert_parallel=2",
            "layout.expert_parallel=1", "layout.expert_parallel", "set it to 1"),
    Example("fsdp2", "model=gpt_1b hardware=h200 layout=fsdp2 precision.gradients=bf16",
            "model.tied_embeddings=true", "model.tied_embeddings=false", "layout.sharding",
            "model.tied_embeddings=false"),
    Example("fsdp2", "model=llama3_8b hardware=h200 layout=fsdp2", "precision=fp16",
            "precision.gradients=bf16", "precision.dtype", "take bf16"),
    Example("fsdp2", "model=llama3_8b hardware=h200 layout=fsdp2 precision.gradients=bf16",
            "layout.overlap=true", "layout.overlap=false", "layout.overlap", "by itself"),
    Example("fsdp2", "model=llama3_8b hardware=h200 layout=fsdp2", "precision.gradients=fp32",
            "precision.gradients=bf16", "precision.gradients", "precision.gradients=bf16"),
    Example("fsdp", "model=gpt_1b hardware=h200 layout=fsdp layout.fsdp_strategy=optim",
            "layout.overlap=true", "layout.overlap=false", "layout.fsdp_strategy", "wrong losses"),
    Example("fsdp", "model=gpt_1b hardware=h200 layout=fsdp", "layout.overlap=false",
            "layout.overlap=true", "layout.overlap", "layout.overlap=true"),
    Example("fsdp", "model=gpt_1b hardware=h200 layout=fsdp layout.pipeline_parallel=2",
            "model.tied_embeddings=true", "model.tied_embeddings=false", "layout.pipeline_parallel",
            "model.tied_embeddings=false"),
    Example("unused-strategy", LLAMA, "layout.fsdp_strategy=optim",
            "layout.fsdp_strategy=optim_grads_params", "layout.fsdp_strategy",
            "layout.sharding=fsdp"),
    Example("recompute", LLAMA, "layout.recompute_layers=2",
            "layout.recompute_layers=2 layout.recompute=full", "layout.recompute_layers",
            "layout.recompute=full"),
    Example("recompute", f"{LLAMA} {FULL} layout.pipeline_parallel=4", "layout.recompute_layers=9",
            "layout.recompute_layers=8", "layout.recompute_layers", "take at most 8"),
    Example("cuda-graph", CPU, "layout.cuda_graph=full", "layout.cuda_graph=none",
            "layout.cuda_graph", "a CPU has no CUDA graphs"),
    Example("cuda-graph", f"{LLAMA} layout.cuda_graph=full", FSDP, "", "layout.cuda_graph",
            "cuda_graph=none"),
    Example("cuda-graph", MOE, "layout.cuda_graph=full", "", "layout.cuda_graph", "experts"),
    Example("recompute", LLAMA, "layout.recompute_modules=[mlp]",
            "layout.recompute_modules=[mlp] layout.recompute=selective", "layout.recompute_modules",
            "means nothing with layout.recompute=none"),
    Example("recompute-mlp-quantised", f"{SELECTIVE} layout.recompute_modules=[mlp]",
            "precision=fp8", "precision=bf16", "layout.recompute_modules", "recompute_layers"),
    Example("recompute", SELECTIVE, "layout.recompute_modules=[]", "layout.recompute_modules=[mlp]",
            "layout.recompute_modules", "none to recompute"),
    Example("recompute", SELECTIVE, "layout.recompute_modules=[core_atn]",
            "layout.recompute_modules=[core_attn]", "layout.recompute_modules",
            "did you mean core_attn?"),
    Example("recompute", SELECTIVE, "layout.recompute_modules=[shared_experts]",
            "layout.recompute_modules=[mlp]", "layout.recompute_modules", "no module that is"),
    Example("recompute", SELECTIVE, "layout.recompute_modules=[moe]", "",
            "layout.recompute_modules", "has none (E)"),
    Example("recompute", f"{MOE} layout.recompute=selective", "layout.recompute_modules=[mlp]",
            "layout.recompute_modules=[moe,core_attn]", "layout.recompute_modules",
            "take of core_attn, moe, moe_act, layernorm"),
    Example("recompute", f"{MOE} layout.recompute=selective layout.recompute_modules=[layernorm]",
            "precision=fp8_delayed", "precision=fp8", "layout.recompute_modules",
            "under delayed scaling"),
    Example("recompute", f"{CPU} model=moe_tiny layout=ddp layout.recompute=selective",
            "layout.recompute_modules=[layernorm]", "layout.recompute_modules=[moe]",
            "layout.recompute_modules", "on a GPU"),
    Example("recompute", f"{CPU} model=moe_tiny layout=ddp layout.recompute=selective",
            "layout.recompute_modules=[moe_act]", "layout.recompute_modules=[moe]",
            "layout.recompute_modules", "on a GPU"),
    Example("recompute-attention", LLAMA, "layout.recompute=selective", "layout.recompute=full",
            "layout.recompute_modules", "saves little"),
    Example("warmup", CPU, "training.optimizer.warmup_steps=200",
            "training.optimizer.warmup_steps=199", "training.optimizer.warmup_steps",
            "fewer than 200"),
    Example("learning-rate", CPU, "training.optimizer.min_learning_rate=1.0",
            "training.optimizer.min_learning_rate=1e-4", "training.optimizer.min_learning_rate",
            "is above learning_rate=0.003"),
    Example("learning-rate", f"{CPU} training.optimizer.min_learning_rate=1e-4",
            "training.optimizer.schedule=constant", "training.optimizer.schedule=linear",
            "training.optimizer.min_learning_rate", "schedule=cosine or linear"),
    Example("evaluation", CPU, "training.eval_steps=0",
            "training.eval_steps=0 training.eval_interval=0", "training.eval_steps",
            "training.eval_interval=0 for no evaluation"),
    Example("unused-data", CPU, "data.paths=[web]", "", "data.paths", "take data=indexed"),
    Example("unused-data", f"{CPU} data=mock", "data.split='9,1,0'", "", "data.split",
            "means nothing with data=mock"),
    Example("unused-data", CPU, "data.tokenizer.path=t.model", "", "data.tokenizer.path",
            "kind byte has no file"),
    Example("tokenizer-vocabulary", CPU, "model.vocab_size=256", "model.vocab_size=257",
            "data.tokenizer", "model.vocab_size=257"),
    Example("cpu-context-parallel", f"{CPU} layout=custom hardware.gpus_per_node=2",
            "layout.context_parallel=2", "layout.context_parallel=1 training.global_batch_size=32",
            "layout.context_parallel", "Transformer Engine"),
    Example("cpu-fsdp-save", f"{CPU} layout=fsdp", "checkpoint.save=true", "checkpoint.save=false",
            "checkpoint.save", "checkpoint.save=false"),
    Example("cpu-fp16", CPU, "precision=fp16", "precision=fp32", "precision",
            "precision=bf16 or fp32"),
    Example("cpu-layers", "model=hybrid_1b layout=ddp", CPU, "hardware=b200", "model.pattern",
            "hardware=b200 launch=plan"),
    Example("instance", "model=llama3_8b layout=ddp hardware=p6_b200",
            "hardware.instance_type=ml.p6-b200.24xlarge",
            "hardware.instance_type=ml.p6-b200.48xlarge", "hardware.instance_type",
            "ml.p6-b200.48xlarge"),
    Example("instance", "model=llama3_8b layout=ddp hardware=p6_b200", "hardware.gpus_per_node=4",
            "hardware.gpus_per_node=8", "hardware.instance_type", "hardware.gpus_per_node=8"),
    Example("hardware-figures", "model=llama3_8b layout=ddp hardware=p6_b200",
            "hardware.memory_gib=192", "hardware.memory_gib=180", "hardware.memory_gib",
            "178.3 GiB of one NVIDIA B200 HGX"),
    Example("hardware-figures", "model=llama3_8b layout=ddp hardware=h200",
            "hardware.memory_gib=1000", "hardware.memory_gib=130", "hardware.memory_gib",
            "null"),
    Example("hardware-figures", "model=llama3_8b layout=ddp hardware=h200",
            "hardware.gpus_per_node=16", "hardware.gpus_per_node=8 hardware.nodes=2",
            "hardware.gpus_per_node", "hardware.gpus_per_node=8 hardware.nodes=2"),
    Example("hardware-figures", "model=llama3_8b layout=ddp hardware=gb300",
            "hardware.gpus_per_node=64", "hardware.nodes=16",
            "hardware.gpus_per_node", "a node of NVIDIA GB300 has 4"),
]  # fmt: skip


def findings(*overrides: str) -> list[Finding]:
    return resolve(config(*" ".join(overrides).split())).findings


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_has_an_example(rule: Rule) -> None:
    assert rule.id in {example.rule for example in EXAMPLES}
    assert rule.source


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_example_is_refused_with_a_way_out(example: Example) -> None:
    found = [f for f in findings(example.common, example.breaks) if f.id == example.rule]
    said = [f for f in found if f.setting == example.setting]
    assert said, f"{example.rule} says nothing of {example.setting}: {found}"
    assert any(example.says in f"{f.message} {f.fix}" for f in said), said
    assert all(f.message and f.fix and f.source for f in said)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_changed_example_is_legal(example: Example) -> None:
    found = findings(example.common, example.passes)
    assert errors(found) == []
    assert example.rule not in {f.id for f in found}


def test_what_was_looked_up_is_taken_as_it_is() -> None:
    """Cards of the name with more memory, and a machine with more of them."""
    more = ("hardware.memory_gib=150", "hardware.gpus_per_node=16")
    found = config("hardware=h200", "model=llama3_8b", "layout=ddp", *more)
    this = found.model_copy(update={"hardware": found.hardware.model_copy(update={"name": "this"})})
    assert "hardware-figures" not in {finding.id for finding in resolve(this).findings}


@pytest.mark.parametrize("choice", ["p5", "p5en", "p6_b200", "p6_b300", "p6e_gb200", "gb300"])
def test_a_choice_has_as_many_gpus_as_a_node_of_its_card(choice: str) -> None:
    hardware = config(f"hardware={choice}").hardware
    assert hardware.gpus_per_node == GPUS[hardware.gpu or ""].node_gpus


@pytest.mark.parametrize("name", ["b100", "H100", "", "gb20"])
def test_an_unknown_gpu_is_refused_before_all_rules(name: str) -> None:
    choice = config("hardware=h100")
    hardware = choice.hardware.model_copy(update={"gpu": name})
    resolution = resolve(choice.model_copy(update={"hardware": hardware}))
    assert resolution.plan is None
    assert [f.setting for f in resolution.findings] == ["hardware.gpu"]
    assert f"take one of {', '.join(GPUS)}" in resolution.findings[0].fix


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ("model.num_layers=1000000000000", "model.num_layers"),
        ("model.num_attention_heads=1000000000000", "model.num_attention_heads"),
        ("hardware.gpus_per_node=1000000000000", "training.global_batch_size"),
        ("layout.pipeline_parallel=1000000000000", "layout.pipeline_parallel"),
        ("layout.tensor_parallel=1000000000000", "layout.tensor_parallel"),
        ("training.micro_batch_size=1000000000000", "training.global_batch_size"),
    ],
)
def test_huge_numbers_are_refused_at_once(overrides: str, setting: str) -> None:
    found = errors(findings("hardware=cpu", overrides))
    assert setting in {f.setting for f in found}


def test_all_findings_come_at_once() -> None:
    found = findings(
        "model=moe_tiny hardware=h100 precision=mxfp8 model.expert_ffn_hidden_size=null"
        " training.optimizer.warmup_steps=500 layout=tp2"
    )
    assert {"precision-gpu", "warmup", "experts-given"} <= {f.id for f in found}
    # Each setting has one error, not one from every place that needs it.
    assert len([f for f in found if f.setting == "model.expert_ffn_hidden_size"]) == 1
