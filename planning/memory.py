"""The peak memory of one GPU by part, before anything runs.

States (weights, gradients, optimizer) are exact counts; what a micro batch keeps is in
planning/activations.py. The peak is the highest of the moments at which a step is at its widest:
the loss's backward pass, a block's backward pass, the optimizer's step. benchmarks/memory_model.md
compares with an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from planning.activations import Activations
from planning.hardware import GIB, GPUS
from planning.parameters import RankParameters, per_rank
from planning.pattern import pipeline_ranks
from planning.rules.base import Facts
from planning.schema import LayoutConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

# Bytes of a quantised weight that Transformer Engine holds, for the forward and for the backward
# product, scales included (transformer_engine/pytorch/tensor/storage/). Hopper multiplies FP8 only
# with the reduced axis last and keeps a transpose; Blackwell needs none
# (utils.py, is_non_tn_fp8_gemm_supported).
_WEIGHT = {
    "delayed": 1.0,
    "current": 1.0,
    "blockwise": 2 * (1 + 4 / 128**2),
    "mxfp8": 2 * (1 + 1 / 32),
    "nvfp4": 2 * (0.5 + 1 / 16),
}

# Measured on an H200 (torch 2.11, driver 580): what cuBLAS keeps of torch's memory,
WORKSPACE = 0.1 * GIB
# what the process holds outside it at the end (context, kernels, libraries),
CONTEXT = 2.8 * GIB
# and what torch could not put to use when a run went out of memory, as a share.
UNUSABLE = 0.01
# cuBLAS for each of the four streams on which the experts' products run (Transformer Engine,
# pytorch/cpp_extensions/gemm.py); measured too.
EXPERT_WORKSPACES = 4 * 32 * 2**20
# NCCL's buffers for each group of more than one GPU; an estimate.
COMMUNICATOR = 0.5 * GIB

WEIGHTS, QUANTISED, GRADIENTS, OPTIMIZER = (
    "weights", "quantised weights", "gradients", "optimizer",
)  # fmt: skip
ACTIVATIONS, RECOMPUTED, LOSS = "activations", "block in work", "logits and loss"
UPDATING = "optimizer at work"
GATHERED, GRAPH, LIBRARIES = "gathered by FSDP", "CUDA graph", "library workspaces"


@dataclass(frozen=True)
class States:
    """Bytes on the heaviest rank, before the first activation."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Estimate:
    """Bytes on the heaviest pipeline rank.

    `parts` add up to `peak`, what torch has allocated at the widest `moment`; `outside` is what the
    process holds besides; `needed` is what a card must have for the run to go through.
    """

    parts: dict[str, float]
    moment: str  # "loss", "block" or "optimizer"
    rank: int  # the pipeline rank
    outside: float
    basis: str

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    @property
    def needed(self) -> float:
        return self.peak * (1 + UNUSABLE) + self.outside


def _by_rank(every: Sequence[str], layout: LayoutConfig) -> list[list[list[tuple[int, str]]]]:
    """The (number, symbols) of the blocks of each pipeline rank, by its virtual stages."""
    pp, vpp = layout.pipeline_parallel or 1, layout.virtual_pipeline_parallel or 1
    return [
        [[(number, every[number]) for number in stage] for stage in rank]
        for rank in pipeline_ranks(len(every), pp, vpp)
    ]


def states(facts: Facts) -> States | None:
    """The states of the heaviest pipeline rank; None: not estimated (no formula for the model).

    Raises ChoiceError: more stages than blocks.
    """
    worst: States | None = None
    for rank, chunks in enumerate(_by_rank(facts.blocks, facts.layout)):
        found = _Rank(facts, rank, chunks).states
        if found is None:
            return None
        if worst is None or found.total > worst.total:
            worst = found
    return worst


def parameters_held(facts: Facts) -> int | None:
    """Of the heaviest pipeline rank, before sharding; None: not counted."""
    ranks = enumerate(_by_rank(facts.blocks, facts.layout))
    held = [_Rank(facts, rank, chunks).held for rank, chunks in ranks]
    return max((one.total for one in held if one), default=0) if all(held) else None


class _Rank:
    """What one pipeline rank holds."""

    def __init__(
        self, facts: Facts, rank: int, chunks: Sequence[Sequence[tuple[int, str]]]
    ) -> None:
        self.model, self.precision = facts.config.model, facts.config.precision
        self.layout, self.gpu, world_size = facts.layout, facts.gpu, facts.world_size
        self.optimizer = facts.config.training.optimizer.name
        self.tp, self.pp, expert = facts.tp, facts.pp, facts.ep
        self.rank, self.chunks = rank, chunks
        self.first, self.last = rank == 0, rank == self.pp - 1
        # Optimizer state is sharded over data x context parallel ranks, that of experts over the
        # ranks that hold the same ones.
        self.shards = max(1, world_size // (self.tp * self.pp))
        self.expert_shards = max(1, world_size // (self.tp * self.pp * expert))
        self.full = self.layout.shards_weights

    def hold(self, symbols: Sequence[str], embedding: bool, output: bool) -> RankParameters | None:
        return per_rank(
            self.model,
            symbols,
            tensor_parallel=self.tp,
            expert_parallel=self.layout.expert_parallel or 1,
            embedding=embedding,
            output=output,
        )

    @cached_property
    def held(self) -> RankParameters | None:
        every = [symbols for chunk in self.chunks for _, symbols in chunk]
        return self.hold(every, self.first, self.last)

    def spread(self, each: float, sharded: bool) -> int:
        """Bytes of `each` bytes a parameter, over the shards or whole."""
        held = self.held
        assert held is not None
        if not sharded:
            return round(each * held.total)
        own = -(-held.dense // self.shards) + -(-held.expert // self.expert_shards)
        return round(each * own)

    @property
    def fuses_weights(self) -> bool:
        """The optimizer holds the main weights itself."""
        precision = self.precision
        return precision.optimizer_moments != "fp32" and not precision.keeps_main_weights_apart

    @cached_property
    def optimizer_bytes(self) -> float:
        """Of one parameter: an FP32 copy of 16-bit weights, and Adam's two moments
        (megatron/core/optimizer/distrib_optimizer.py) or SGD's momentum."""
        precision = self.precision
        moments = 1 if self.optimizer == "sgd" else 2
        moment = float(BYTES[precision.optimizer_moments])
        if precision.optimizer_moments == "fp8" and not self.gpu.is_blackwell:
            moment *= 2  # Transformer Engine keeps a transpose of it too, as of a weight
        if precision.dtype == "fp32":
            return moments * moment
        if self.layout.sharding == "fsdp" and self.fuses_weights:
            # Transformer Engine makes its own FP32 copy of Megatron-FSDP's FP32 weights
            # (fused_adam.py, initialize_state), which it does not know for main weights.
            return moments * moment + 8
        # Of BF16 it keeps the 16 bits that the weights lack (store_param_remainders).
        lacking = self.fuses_weights and precision.dtype == "bf16" and not precision.param_gather
        return moments * moment + (2 if lacking else 4)

    @cached_property
    def updating_bytes(self) -> float:
        """More of one parameter while the optimizer works: gradients of 16 bits in FP32
        (optimizer.py, _copy_model_grads_to_main_grads), and FP8 moments in FP32 (Transformer
        Engine, fused_adam.py)."""
        precision = self.precision
        converted = BYTES[precision.gradients] < 4 and not self.fuses_weights
        return 4.0 * converted + 8.0 * (precision.optimizer_moments == "fp8")

    @cached_property
    def states(self) -> States | None:
        if self.held is None:
            return None
        return States(
            weights=self.spread(BYTES[self.precision.dtype], self.full),
            gradients=self.spread(BYTES[self.precision.gradients], self.layout.shards_gradients),
            optimizer=self.spread(self.optimizer_bytes, self.layout.shards_optimizer),
        )


def estimate(facts: Facts) -> Estimate | None:
    """None: not estimated (a CPU, a model without formulas). The layout is complete and legal."""
    if facts.gpu.is_cpu:
        return None
    kept = Activations(facts)
    worst: Estimate | None = None
    for rank, chunks in enumerate(_by_rank(facts.blocks, facts.layout)):
        found = _of_rank(facts, kept, rank, chunks)
        if found is None:
            return None
        if worst is None or found.needed > worst.needed:
            worst = found
    return worst


def _of_rank(
    facts: Facts,
    kept: Activations,
    number: int,
    chunks: Sequence[Sequence[tuple[int, str]]],
) -> Estimate | None:
    config, layout = facts.config, facts.layout
    precision = config.precision
    rank = _Rank(facts, number, chunks)
    if rank.states is None or rank.held is None:
        return None
    start, end = facts.bf16_blocks
    low = range(start, facts.num_blocks - end) if precision.format != "none" else range(0)
    quantised = _quantised(rank, [s for chunk in chunks for n, s in chunk if n in low])
    weight = _WEIGHT.get(precision.recipe, 0.0)
    if precision.recipe in ("delayed", "current") and not facts.gpu.is_blackwell:
        weight *= 2
    weights = float(rank.states.weights)
    copies = weight * quantised
    if precision.param_gather:  # they stand in the place of the BF16 ones
        weights -= BYTES[precision.dtype] * quantised / (rank.shards if rank.full else 1)
        weights += copies / (rank.shards if rank.full else 1)
        copies = 0.0
    steady = {
        WEIGHTS: weights,
        QUANTISED: copies,
        GRADIENTS: float(rank.states.gradients),
        OPTIMIZER: float(rank.states.optimizer),
        GATHERED: _gathered(rank),
        LIBRARIES: WORKSPACE + EXPERT_WORKSPACES * any("E" in block for block in facts.blocks),
        GRAPH: 0.06 * GIB if layout.cuda_graph == "full" else 0.0,
    }
    activations, recomputed = _in_flight(facts, kept, rank, low)
    moments = {"block": {ACTIVATIONS: activations, RECOMPUTED: recomputed}}
    if rank.last:
        loss = kept.loss()
        widest = max(
            loss.softmax + loss.gradient + loss.cast,
            (loss.cast or loss.gradient) + loss.weight_gradient,
        )
        moments["loss"] = {ACTIVATIONS: activations, LOSS: loss.saved + widest}
    # Low precision weights are made anew from the optimizer's shard.
    own = quantised / (rank.shards if layout.shards_optimizer else 1)
    moments["optimizer"] = {
        QUANTISED: copies + (2 * own if precision.param_gather else 0.0),
        UPDATING: float(rank.spread(rank.updating_bytes, layout.shards_optimizer)),
    }
    groups = sum(
        size > 1 for size in (facts.tp, facts.pp, facts.cp, facts.ep, facts.world_size // facts.tp)
    )
    found = [
        Estimate(
            parts={part: size for part, size in (steady | moment).items() if size},
            moment=name,
            rank=number,
            outside=CONTEXT + groups * COMMUNICATOR,
            basis=basis(facts),
        )
        for name, moment in moments.items()
    ]
    return max(found, key=lambda estimate: estimate.peak)


def _quantised(rank: _Rank, symbols: Sequence[str]) -> float:
    """Parameters of linear layers in blocks that compute in the low format, norms left out."""
    if not symbols:
        return 0.0
    held = rank.hold(symbols, False, False)
    assert held is not None
    norms = rank.model.hidden_size * sum(len(block) for block in symbols)
    return float(held.total - norms)


def _in_flight(facts: Facts, kept: Activations, rank: _Rank, low: range) -> tuple[float, float]:
    """(what the micro batches in flight keep, more while a block is computed backward)."""
    layout = facts.layout
    chunks = []
    again = working = 0.0
    for chunk in rank.chunks:
        whole = 0.0
        for position, (number, symbols) in enumerate(chunk):
            block = kept.block(symbols, number in low)
            working = max(working, block.working)
            if layout.recompute != "full":
                whole += block.whole
            elif layout.recompute_layers is None:
                whole += block.input
                again = max(again, block.whole)
            elif position < layout.recompute_layers:
                whole += block.inputs
                again = max(again, block.whole)
            else:
                whole += block.whole
        chunks.append(whole)
    training = facts.config.training
    micro = training.global_batch_size // (training.micro_batch * facts.data_parallel)
    ahead = facts.pp - rank.rank - 1
    if facts.vpp == 1:
        flying = min(ahead + 1, max(micro, 1)) * chunks[0]
    else:
        # Interleaved schedule (schedules.py): so many chunks are forward before the first backward.
        number = min(ahead * 2 + (facts.vpp - 1) * facts.pp + 1, max(micro, 1) * facts.vpp)
        flying = number * sum(chunks) / len(chunks)
    return flying, again + working


def _gathered(rank: _Rank) -> float:
    """Whole weights and gradients that a fully sharding layout holds for a while: two layers
    (one in use, one on its way), embedding and output. An estimate, not measured; one rank gathers
    nothing, which was."""
    if not rank.full or rank.shards == 1:
        return 0.0
    each = BYTES[rank.precision.dtype] + BYTES[rank.precision.gradients]
    layers = [rank.hold([symbols], False, False) for chunk in rank.chunks for _, symbols in chunk]
    largest = max((held.total for held in layers if held is not None), default=0)
    tables = rank.hold([], rank.first, rank.last)
    return each * (2 * largest + (tables.total if tables else 0))


def basis(facts: Facts) -> str:
    """How far the figure has been held against a card."""
    config, layout = facts.config, facts.layout
    if facts.gpu.name != "h200" or config.precision.recipe in ("mxfp8", "nvfp4"):
        return "from source, not measured on this card"
    replicated = layout.sharding in ("none", "optimizer") and not (
        facts.tp * facts.pp * facts.cp * facts.ep > 1
    )
    if (facts.world_size == 1 or replicated) and facts.consists_of("*-E"):
        return "model measured on H200"
    return "from source, parts not measured"


def capacity_gib(facts: Facts) -> float | None:
    """What one GPU, or the machine with a CPU, has."""
    hardware = facts.config.hardware
    return hardware.memory_gib or GPUS[hardware.gpu or "cpu"].memory_gib
