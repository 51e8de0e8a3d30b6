"""Seconds of the kernels of a training step on a card.

The curves were fitted to one H200's kernels (planning/curves.json, written by benchmarks/fit.py
from benchmarks/h200/kernels.json): what share of the card's peak a matrix product reaches by its
shape, and what share of its memory bandwidth the other kernels reach. On another card the same
curves count from its own peaks, with the shares that its published training rates ask for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from planning.hardware import GPUS, Gpu

TILE = (128, 256)  # of the result that one multiprocessor computes at a time
MULTIPROCESSORS = {"h100": 132, "h200": 132, "b200": 148, "b300": 148, "gb200": 148, "gb300": 148}
MEASURED = "h200"
# Whose entry of curves.json's cards counts: a card without published rates is taken as its like.
CARDS = {"h100": "h200", "h200": "h200", "b200": "b200", "b300": "b200", "gb200": "gb200",
         "gb300": "gb200"}  # fmt: skip
BANDWIDTH_BOUND = 0.5  # share of the bandwidth from which a kernel gains by more of it
_FILE = Path(__file__).with_name("curves.json")


@dataclass(frozen=True)
class Curve:
    """share: of the peak, for large products. depth: at which an inner dimension costs double.
    waste: how much of the idle multiprocessors' time in the last wave is lost. start_s: fixed."""

    share: float
    depth: float
    waste: float
    start_s: float


@cache
def curves() -> Mapping[str, Any]:
    data: dict[str, Any] = json.loads(_FILE.read_text())
    return data


@cache
def kernels(gpu: str) -> Kernels:
    return Kernels(GPUS[gpu])


class Kernels:
    """Times on one card. `format` is that of the product's operands: bf16, fp8, fp8_blockwise,
    mxfp8 or nvfp4; `kind` forward, dgrad or wgrad."""

    def __init__(self, gpu: Gpu) -> None:
        data = curves()
        assert gpu.bf16_tflops is not None
        assert gpu.memory_tb_s is not None
        self.gpu = gpu
        self.sms = MULTIPROCESSORS[gpu.name]
        card = data["cards"][CARDS[gpu.name]]
        steady = data["sustained"] * card["rate"]
        self.bandwidth = gpu.memory_tb_s * 1e12
        self.rates = {name: self._rate(share) for name, share in data["traffic"].items()}
        self.peak = gpu.bf16_tflops * 1e12
        self.casts: Mapping[str, Mapping[str, float]] = data["casts"]
        bf16 = gpu.bf16_tflops
        fp8, fp4 = gpu.fp8_tflops or bf16, gpu.fp4_tflops or bf16
        peaks = {"bf16": bf16, "head": bf16, "fp8": fp8, "fp8_blockwise": fp8, "mxfp8": fp8}
        peaks["nvfp4"] = fp4
        self.gemms: dict[tuple[str, str], tuple[float, Curve]] = {}
        for format, peak in peaks.items():
            fitted = data["gemm"].get(format, data["gemm"]["fp8"])
            for kind, values in fitted.items():
                curve = Curve(**values)
                rate = peak * 1e12 * curve.share * steady * card["gemm"].get(format, 1.0)
                self.gemms[format, kind] = rate, curve
        self.attention_rates = {
            (int(dim), kind): gpu.bf16_tflops * 1e12 * share * steady
            for dim, shares in data["attention"]["share"].items()
            for kind, share in shares.items()
        }
        self.attention_length: Mapping[str, float] = data["attention"]["length"]
        self.attention_start: Mapping[str, float] = data["attention"]["start_s"]

    def gemm(self, format: str, kind: str, rows: float, columns: float, depth: float) -> float:
        """A product of [rows, depth] and [depth, columns]; columns are the weight's, or for a
        weight's gradient both are the weight's and `depth` the tokens."""
        rate, curve = self.gemms[format, kind]
        waves = ceil(rows / TILE[0]) * ceil(columns / TILE[1]) / self.sms
        idle = ceil(waves) / waves - 1
        busy = 2 * rows * columns * depth / rate * (1 + curve.depth / depth)
        return busy * (1 + curve.waste * idle) + curve.start_s

    def attention(
        self, kind: str, length: float, pairs: float, heads: float, dim: int, batch: float
    ) -> float:
        """Fused attention. pairs: of positions that see each other, of one head and sequence;
        `length`: of the queries."""
        rate = self.attention_rates.get((dim, kind)) or self.attention_rates[128, kind] * min(
            1.0, dim / 128
        )
        operations = {"forward": 4, "backward": 10}[kind] * pairs * heads * dim * batch
        busy = operations / rate * (1 + self.attention_length[kind] / length)
        return busy + self.attention_start[kind]

    def cast(self, recipe: str, elements: float) -> float:
        """BF16 to the recipe's format, with the transpose or the second scaling that the backward
        pass needs, and the largest value's search where the recipe has one."""
        if recipe == "none":
            return 0.0
        cast = self.casts[recipe]
        return elements * cast["bytes"] / (self.bandwidth * cast["share"]) + cast["start_s"]

    def move(self, what: str, size: float) -> float:
        """A kernel that is bound by its `size` bytes of reads and writes."""
        return size / self.rates[what]

    def _rate(self, share: float) -> float:
        """Bytes/s of a kernel that reached `share` of the measured card's bandwidth. One that did
        not come near it is bound by its instructions, and gains by multiprocessors alone."""
        if share >= BANDWIDTH_BOUND:
            return share * self.bandwidth
        measured = GPUS[MEASURED]
        assert measured.memory_tb_s is not None
        return share * measured.memory_tb_s * 1e12 * self.sms / MULTIPROCESSORS[MEASURED]
