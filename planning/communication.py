"""Seconds of NCCL collectives by the links that a group of ranks uses.

Ranks stand in Megatron's order: tensor parallel neighbours first, then context, data and pipeline
parallel (parallel_state.py, order tp-cp-ep-dp-pp), so a group has a size and a stride.

The shares of a link's nominal rate that a large collective reaches, and the latencies, are
estimates from the order of what nccl-tests report on such systems; nothing here was measured by
this repository.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planning.hardware import GPUS, INSTANCES
from planning.schema import HardwareConfig

NVLINK_SHARE = 0.78
NETWORK_SHARE = 0.80
# One 400 Gb/s adapter a GPU, the usual build of an 8-GPU server; B300's is twice that. For
# hardware that names no instance type.
NETWORK_GBPS_PER_GPU = {"b300": 800.0, "gb300": 800.0}
USUAL_NETWORK_GBPS_PER_GPU = 400.0
START_S = 12e-6  # of a collective's kernel
HOP_S = 1.2e-6  # a rank over NVLink
NETWORK_HOP_S = 10e-6  # a node over the network


@dataclass(frozen=True)
class Links:
    """What one GPU can send (bytes/s, one direction), and how many GPUs NVLink joins."""

    nvlink: float
    network: float
    domain: int

    def group(self, size: int, stride: int) -> Group:
        """The group of ranks 0, stride, 2*stride, ..."""
        near = min(size, max(1, self.domain // stride))
        while size % near:
            near -= 1
        return Group(self, size, near)


@dataclass(frozen=True)
class Group:
    """`size` ranks, `near` of them joined by NVLink."""

    links: Links
    size: int
    near: int

    @property
    def _rate(self) -> float:
        """Bytes/s that enter a rank of a ring. A ring between nodes uses the adapters of all of
        the group's ranks in a node."""
        if self.near == self.size:
            return self.links.nvlink
        return min(self.links.nvlink, self.near * self.links.network)

    @property
    def _latency(self) -> float:
        nodes = self.size // self.near
        return START_S + HOP_S * (self.near - 1) + NETWORK_HOP_S * math.log2(nodes)

    def gather(self, size: float) -> float:
        """Seconds of an all-gather that gives, or a reduce-scatter that takes, `size` bytes."""
        if self.size == 1:
            return 0.0
        return size * (self.size - 1) / self.size / self._rate + self._latency

    def reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes."""
        return 0.0 if self.size == 1 else 2 * self.gather(size)

    def exchange(self, size: float) -> float:
        """Seconds of an all-to-all in which each rank sends `size` bytes (with its own)."""
        if self.size == 1:
            return 0.0
        near = size * (self.near - 1) / self.size / self.links.nvlink
        far = size * (self.size - self.near) / self.size / self.links.network
        return max(near, far) + self._latency

    def send(self, size: float) -> float:
        """Seconds of `size` bytes to the next rank of the group."""
        if self.size == 1:
            return 0.0
        rate = self.links.nvlink if self.near == self.size else self.links.network
        return size / rate + START_S


def links(hardware: HardwareConfig) -> Links | None:
    """None: a CPU, or a card whose links are not known."""
    gpu = GPUS[hardware.gpu or "cpu"]
    per_node = hardware.gpus_per_node or 1
    if gpu.nvlink_gb_s is None:
        return None
    if instance := INSTANCES.get(hardware.instance_type or ""):
        gbps = instance.network_gbps / instance.gpus
    else:
        gbps = NETWORK_GBPS_PER_GPU.get(gpu.name, USUAL_NETWORK_GBPS_PER_GPU)
    # nvlink_gb_s counts both directions.
    return Links(
        nvlink=gpu.nvlink_gb_s / 2 * 1e9 * NVLINK_SHARE,
        network=gbps / 8 * 1e9 * NETWORK_SHARE,
        domain=gpu.nvlink_domain or per_node,
    )
