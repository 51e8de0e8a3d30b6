"""The time of a training step by part, before anything runs.

Kernels by shape (planning/kernels.py), collectives by link (planning/communication.py); what runs
is read from Megatron-Core 0.19.2 and Transformer Engine 2.20: which products, casts and passes a
layer makes, what waits for what. benchmarks/throughput_model.md compares with measured steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

from planning import communication, flops
from planning.data_parallel import DataParallel, Window
from planning.formulas import evaluate, fields, head_dim
from planning.hardware import Gpu
from planning.kernels import MEASURED, Kernels, curves, kernels
from planning.layers import FORMULA, OTHER, Layer, Shape, add, head, layer
from planning.parameters import RankParameters, padded_vocab_size, per_rank
from planning.pattern import pipeline_ranks
from planning.rules.base import Facts
from planning.schema import ModelConfig, PrecisionConfig, RunConfig

Basis = Literal[
    "measured on H200",
    "measured on H200, links estimated",
    "calibrated on published rows",
    "extrapolated",
]
CALIBRATED = ("b200", "gb200")  # by published rates (benchmarks/published.json)
STEADY = 8  # micro batches after which each one is like the last


@dataclass(frozen=True)
class Estimate:
    """One training step. `parts` are seconds of the slowest pipeline rank and add up to step_s.

    FLOP by planning/flops.py; mfu is the share of mfu_peak_tflops, the dense peak of the format of
    the run's matrix products (mfu_format).
    """

    step_s: float
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    mfu_peak_tflops: float
    mfu_format: str
    parts: dict[str, float]
    basis: Basis


def peak_tflops(gpu: Gpu, precision: PrecisionConfig) -> float | None:
    """The dense peak that MFU is a share of: that of the matrix products' format on the card."""
    return {"none": gpu.bf16_tflops, "fp8": gpu.fp8_tflops, "fp4": gpu.fp4_tflops}[precision.format]


def product_format(gpu: Gpu, precision: PrecisionConfig) -> str:
    """The curve (planning/curves.json) of the linear layers' products."""
    if precision.format == "none":
        return "bf16"
    if precision.recipe == "blockwise" and gpu.is_blackwell:
        return "mxfp8"  # which emulates it there
    return {"delayed": "fp8", "current": "fp8", "blockwise": "fp8_blockwise"}.get(
        precision.recipe, precision.recipe
    )


def estimate(config: RunConfig, facts: Facts) -> Estimate | None:
    """None: not estimated (a CPU, FP32, a card or a model without figures).

    `config.layout` is complete and legal. Raises ChoiceError: an impossible pattern or formula.
    """
    if facts.config is not config:
        facts = replace(facts, config=config)
    model, precision, gpu = config.model, config.precision, facts.gpu
    peak, operations = (
        peak_tflops(gpu, precision),
        flops.step(model, config.training.global_batch_size),
    )
    links = communication.links(config.hardware)
    if peak is None or operations is None or links is None or precision.dtype == "fp32":
        return None
    if precision.emulate:
        return None
    parts = _Step(config, facts, kernels(gpu.name), links).parts()
    step_s = sum(parts.values())
    tokens = config.training.global_batch_size * model.seq_length
    tflops = operations / step_s / facts.world_size / 1e12
    return Estimate(
        step_s=step_s,
        tokens_per_s_per_gpu=tokens / step_s / facts.world_size,
        model_tflops_per_gpu=tflops,
        mfu=tflops / peak,
        mfu_peak_tflops=peak,
        mfu_format={"none": "BF16", "fp8": "FP8", "fp4": "FP4"}[precision.format],
        parts={name: s for name, s in parts.items() if s > 0},
        basis=_basis(facts, gpu),
    )


def _formula(model: ModelConfig, name: str) -> float:
    """A formula's value, or 0 without formulas. Raises ChoiceError: it is no arithmetic."""
    if model.formulas is None:
        return 0.0
    setting = f"model.formulas.{name}"
    return float(evaluate(getattr(model.formulas, name), fields(model), setting))


def _basis(facts: Facts, gpu: Gpu) -> Basis:
    if not facts.consists_of("*-"):
        return "extrapolated"
    if gpu.name == MEASURED:
        alone = facts.world_size == 1
        return "measured on H200" if alone else "measured on H200, links estimated"
    return "calibrated on published rows" if gpu.name in CALIBRATED else "extrapolated"


HEAD_AND_LOSS, RECOMPUTE = "output layer and loss", "recompute"
STATES, GAPS = "gradients and optimizer", "launch gaps"
DATA, PIPELINE, BUBBLE = "data parallel", "pipeline parallel", "pipeline bubble"


class _Step:
    def __init__(self, config: RunConfig, f: Facts, k: Kernels, links: communication.Links) -> None:
        self.config, self.f, self.k = config, f, k
        model, layout, training = config.model, f.layout, config.training
        self.micro_batches = max(
            1, training.global_batch_size // (training.micro_batch * f.data_parallel)
        )
        self.data = DataParallel(f, k, links)
        self.stage_group = links.group(f.pp, f.tp * f.cp * f.data_parallel)
        self.shape = Shape(
            tokens=training.micro_batch * model.seq_length // f.cp,
            batch=training.micro_batch,
            length=model.seq_length,
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size,
            heads=model.num_attention_heads / f.tp,
            groups=max(1.0, model.num_query_groups / f.tp),
            dim=head_dim(model),
            qk_norm=model.qk_norm,
            experts=model.num_experts or 0,
            experts_per_token=model.experts_per_token or 0,
            expert_ffn=model.expert_ffn_hidden_size or 0,
            tensor=links.group(f.tp, 1),
            sequence_parallel=bool(layout.sequence_parallel),
            context=links.group(f.cp, f.tp),
            expert=links.group(f.ep, f.tp),
            formula_flops=_formula(model, "flops"),
            formula_bytes=_formula(model, "activation_bytes"),
        )
        self.vocabulary = padded_vocab_size(model)
        every = tuple(f.blocks)
        if model.formulas is not None:
            self.layer_names: tuple[tuple[str, ...], ...] = ((FORMULA,),) * len(every)
        else:
            self.layer_names = tuple(tuple(block) for block in every)
        self.stages = [
            [every[number] for stage in rank for number in stage]
            for rank in pipeline_ranks(len(every), f.pp, f.vpp)
        ]
        low = config.precision.format != "none"
        self.ranks = _layers_of(self.layer_names, f.pp, f.vpp, f.bf16_blocks, low)
        self.windows: list[Window] = []  # of the pipeline ranks

    def parts(self) -> dict[str, float]:
        found = [self._rank(rank) for rank in range(self.f.pp)]
        totals = [sum(parts.values()) for parts in found]
        slowest = max(range(self.f.pp), key=totals.__getitem__)
        parts = {name: s * self.micro_batches for name, s in found[slowest].items()}
        if self.f.pp > 1:
            parts[BUBBLE] = (self.f.pp - 1) / self.f.vpp * sum(totals) / self.f.pp
            parts[PIPELINE] = self._pipeline()
        parts[GAPS] = self._gaps(slowest)
        held, window = self._held[slowest], self.windows[slowest]
        once = {
            STATES: self.data.update(held),
            DATA: self.data.reduce(held, window),
            GAPS: curves()["host"]["step"],
        }
        return add(parts, once)

    def _layers(self, rank: int) -> Iterable[tuple[Layer, str, int]]:
        recipe, format = (
            self.config.precision.recipe,
            product_format(self.f.gpu, self.config.precision),
        )
        for (symbol, low), count in self.ranks[rank].items():
            chosen = (format, recipe) if low else ("bf16", "none")
            yield layer(self.k, self.shape, symbol, *chosen), symbol, count

    def _rank(self, rank: int) -> dict[str, float]:
        """A micro batch forward and backward on a pipeline rank, all its virtual stages."""
        forward: dict[str, float] = defaultdict(float)
        backward: dict[str, float] = defaultdict(float)
        again = 0.0
        for each, symbol, number in self._layers(rank):
            for name, s in each.forward.items():
                forward[name] += s * number
            for name, s in each.backward.items():
                backward[name] += s * number
            again += self._again(each, symbol, number, rank)
        parts = add(forward, backward)
        if again:
            parts[RECOMPUTE] = again
        output = 0.0
        if rank == self.f.pp - 1:
            last = head(self.k, self.shape, self.vocabulary)
            output = sum(last.forward.values()) + sum(last.backward.values())
        if rank == 0:
            output += self.k.move("copy", 2.0 * self.shape.tokens * self.shape.hidden * 6)
            # The gradient of the table is dense: 7 bytes an element at a copy's rate, measured.
            output += self.k.move("copy", 7.0 * self.vocabulary / self.f.tp * self.shape.hidden)
        if output:
            parts[HEAD_AND_LOSS] = output
        held = self._held[rank]
        parts[STATES] = self.data.accumulate(held)
        window = Window(
            forward=sum(forward.values()),
            output=output,
            backward=sum(backward.values()) + again + parts[STATES],
        )
        self.windows.append(window)
        parts[DATA] = self.data.exchange(held, window)
        return parts

    def _again(self, each: Layer, symbol: str, number: int, rank: int) -> float:
        """Seconds in which a micro batch's backward pass computes the layer's forward again."""
        layout = self.f.layout
        if layout.recompute == "full":
            return sum(each.forward.values()) * number * self._share_again(rank)
        if layout.recompute == "selective":
            modules = set(layout.recompute_modules)
            if (symbol == "*" and "core_attn" in modules) or (symbol == "E" and "moe" in modules):
                return each.core_forward * number
            if symbol == "-" and "mlp" in modules:
                return each.core_forward * number
            if symbol == "E" and "moe_act" in modules:
                return each.forward[OTHER] * 0.3 * number
        return 0.0

    def _share_again(self, rank: int) -> float:
        """Of recompute=full: the first blocks of each virtual stage, or all."""
        here = len(self.stages[rank])
        return min(1.0, (self.f.layout.recompute_layers or here) * self.f.vpp / here)

    @cached_property
    def _held(self) -> list[RankParameters]:
        """The parameters of each pipeline rank."""
        found = [
            per_rank(
                self.config.model,
                stage,
                tensor_parallel=self.f.tp,
                expert_parallel=self.f.ep,
                embedding=rank == 0,
                output=rank == self.f.pp - 1,
            )
            for rank, stage in enumerate(self.stages)
        ]
        return [held for held in found if held is not None]  # all: the stack is known

    def _gaps(self, rank: int) -> float:
        """Time of a step in which the GPU waits for the process that launches its kernels.

        The process runs ahead through forward pass, loss and backward pass until the step's end.
        """
        if self.f.layout.cuda_graph == "full":
            return 0.0
        host: Mapping[str, Any] = curves()["host"]
        low = host["recipe"].get(self.config.precision.recipe, 1.0)
        forward = backward = 0.0
        for (symbol, is_low), number in self.ranks[rank].items():
            each = number * (low if is_low else 1.0)
            forward += each * host["forward"].get(symbol, host["forward"]["*"])
            backward += each * host["backward"].get(symbol, host["backward"]["*"])
        if self.f.layout.recompute == "full":
            backward += forward * self._share_again(rank)
        window = self.windows[rank]
        phases = (
            (forward, window.forward),
            (host["output"], window.output),
            (backward, window.backward),
        )
        launched = done = 0.0
        gaps = [0.0]
        for number in range(1, min(self.micro_batches, STEADY) + 1):
            for launch, busy in phases:
                launched += launch
                done = max(done + busy, launched)
            gaps.append(done - number * sum(busy for _, busy in phases))
        rest = self.micro_batches - len(gaps) + 1
        return gaps[-1] + rest * (gaps[-1] - gaps[-2])

    def _pipeline(self) -> float:
        """Activations to the next rank and gradients back, of all micro batches. One stage a rank:
        each waits for both; with virtual stages the next one computes meanwhile."""
        size = 2.0 * self.shape.own_tokens * self.shape.hidden
        each = 2 * self.stage_group.send(size)
        waits = 1.0 if self.f.vpp == 1 else 0.2 * self.f.vpp
        return each * self.micro_batches * waits


@cache
def _layers_of(
    every: tuple[tuple[str, ...], ...], pp: int, vpp: int, in_bf16: tuple[int, int], low: bool
) -> list[Counter[tuple[str, bool]]]:
    """The layers of each pipeline rank: (symbol, whether in low precision) -> how many."""
    first, last = in_bf16[0], len(every) - in_bf16[1]
    return [
        Counter(
            (symbol, low and first <= number < last)
            for stage in rank
            for number in stage
            for symbol in every[number]
        )
        for rank in pipeline_ranks(len(every), pp, vpp)
    ]
