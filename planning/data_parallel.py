"""What a step does with gradients, optimizer state and weights, and what their exchange between
data parallel ranks leaves to wait for.

Passes as Megatron's DDP, distributed optimizer and FSDP make them (megatron/core/distributed,
megatron/core/optimizer).
"""

from __future__ import annotations

from dataclasses import dataclass

from planning.communication import Links
from planning.kernels import Kernels
from planning.memory import BYTES
from planning.parameters import RankParameters
from planning.rules.base import Facts

GATHERED = {"fp8": 1.0, "fp4": 0.5 + 1 / 16}  # bytes of a weight that is gathered in its format
BUCKET = 40_000_000  # parameters whose gradients Megatron reduces together, at least
# Share of the time of overlapped communication by which it slows the computation beside it: both
# want multiprocessors and memory. An estimate.
OVERLAP_COST = 0.1


@dataclass(frozen=True)
class Window:
    """Seconds of computation of a micro batch on one rank, in the order in which it happens."""

    forward: float
    output: float  # the output layer, the loss and both their gradients
    backward: float


class DataParallel:
    """Times of one pipeline rank that holds `held` and computes `window`; seconds."""

    def __init__(self, f: Facts, k: Kernels, links: Links) -> None:
        self.f, self.k = f, k
        self.layout, self.precision = f.layout, f.config.precision
        self.group = links.group(f.data_parallel * f.cp, f.tp)
        expert_ranks = max(1, f.world_size // (f.tp * f.pp * f.ep))
        self.expert_group = links.group(expert_ranks, f.tp * f.ep)
        self.gradient = BYTES[self.precision.gradients]
        low = self.precision.param_gather and self.precision.format != "none"
        self.weight = GATHERED[self.precision.format] if low else float(BYTES["bf16"])

    def accumulate(self, held: RankParameters) -> float:
        """Each micro batch: its BF16 gradients added to the step's."""
        return self.k.move("accumulate", held.total * (2 + 2 * self.gradient))

    def exchange(self, held: RankParameters, window: Window) -> float:
        """What each micro batch waits for: weights and gradients where they are sharded."""
        if not self.layout.shards_gradients:
            return 0.0
        gather = self._gather(held, self.weight) if self.layout.shards_weights else 0.0
        scatter = self._gather(held, self.gradient)
        return self._exposed(gather, window.forward, held) + self._exposed(
            gather + scatter, window.backward, held
        )

    def update(self, held: RankParameters) -> float:
        """Once a step: the passes over gradients, optimizer state and weights."""
        k, precision, training = self.k, self.precision, self.f.config.training
        own = float(held.total)
        if self.layout.shards_optimizer:
            own = held.dense / self.group.size + held.expert / self.expert_group.size
        gradients = self.gradient * (own if self.layout.shards_gradients else held.total)
        seconds = k.move("zero", gradients)
        if self.group.size > 1:
            seconds += k.move("copy", 2 * gradients)  # divided by the ranks
        if self.gradient < 4:
            seconds += k.move("copy", own * 6)  # to FP32, for the norm and the optimizer
        seconds += k.move("norm", own * 4)
        if precision.dtype == "fp16":
            seconds += k.move("clip", own * 8)  # unscaled, and searched for infinities
        if training.optimizer.clip_grad:
            seconds += k.move("clip", own * 8)
        if training.optimizer.name == "sgd":
            seconds += k.move("adam", own * 20)
        elif precision.optimizer_moments == "fp32":
            seconds += k.move("adam", own * 28)
        else:  # writes the weights too
            seconds += k.move("adam 16", own * (16 + 4 * BYTES[precision.optimizer_moments]))
            if precision.optimizer_moments == "fp8":
                # To FP32 and back: read, written; the largest found; read, written (fused_adam.py).
                seconds += k.move("copy", own * 2 * (1 + 4 + 4 + 4 + 1))
        if precision.dtype != "fp32" and precision.optimizer_moments == "fp32":
            seconds += k.move("copy", own * 6)  # weights from the optimizer's FP32
        if precision.format != "none":
            # Cast once a step, or once a rank where the low precision weights are gathered.
            seconds += k.cast(precision.recipe, own if precision.param_gather else held.total)
        return seconds

    def reduce(self, held: RankParameters, window: Window) -> float:
        """Once a step: what the exchange of gradients and new weights leaves to wait for."""
        if self.layout.shards_gradients:
            return 0.0
        scatter = self._gather(held, self.gradient)
        if not self.layout.shards_optimizer:
            return self._exposed(2 * scatter, window.backward, held)  # an all-reduce
        gather = self._gather(held, self.weight)
        return self._exposed(scatter, window.backward, held) + self._exposed(
            gather, window.forward, held
        )

    def _gather(self, held: RankParameters, size: float) -> float:
        """An all-gather or reduce-scatter of all parameters at `size` bytes each."""
        experts = self.expert_group.gather(held.expert * size) if held.expert else 0.0
        return self.group.gather(held.dense * size) + experts

    def _exposed(self, sent: float, window: float, held: RankParameters) -> float:
        """Of `sent` seconds of communication beside `window` seconds of computation: what is left,
        at least that of the first or last bucket, and what the computation loses."""
        if sent == 0.0 or not (self.layout.overlap or self.layout.sharding == "fsdp2"):
            return sent
        edge = sent * min(1.0, BUCKET / max(1, held.total))
        hidden = min(sent - edge, window)
        return sent - hidden + OVERLAP_COST * hidden
