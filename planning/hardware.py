"""The GPUs and instances that a plan can name, with the figures that rules and estimates use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30
# A card's memory differs from the table's by more: another model of the kind, or a MIG instance.
SAME_MEMORY = 0.02


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Peaks are dense TFLOP/s; None: the format has no tensor cores there.

    memory_gib is what CUDA offers to a process, not the nominal size.
    """

    name: str
    title: str
    compute_capability: tuple[int, int] | None
    memory_gib: float | None
    memory_tb_s: float | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    fp4_tflops: float | None
    nvlink_gb_s: float | None  # bidirectional
    node_gpus: int | None = None  # on one HGX board, or in one tray
    nvlink_domain: int | None = None  # GPUs that NVLink joins across nodes; None: a node's own

    @property
    def is_cpu(self) -> bool:
        return self.compute_capability is None

    @property
    def is_blackwell(self) -> bool:
        return self.compute_capability is not None and self.compute_capability >= (10, 0)

    def supports(self, recipe: str) -> bool:
        """Whether a low precision recipe runs on this GPU (TE 2.20 quantization.py's gates, except
        that NVFP4's open upper bound is closed: its training kernels fail on sm_120)."""
        if recipe == "none":
            return True
        if self.compute_capability is None:
            return False
        capability = self.compute_capability
        if recipe in ("delayed", "current"):
            return capability >= (8, 9)
        if recipe == "blockwise":
            return capability >= (9, 0)
        return (10, 0) <= capability < (12, 0)  # mxfp8, nvfp4


# H100..GB300: vendor datasheets, dense. Memory: nvidia-smi MiB less what CUDA keeps (B200: 183359
# MiB give 178.35 GiB to CUDA; H200: 143771 MiB give 139.80 GiB, read on the cards; others scaled
# alike).
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("cpu", "CPU", None, None, None, None, None, None, None),
        Gpu("h100", "NVIDIA H100 SXM", (9, 0), 79.1, 3.35, 989, 1979, None, 900, 8),
        Gpu("h200", "NVIDIA H200 SXM", (9, 0), 139.8, 4.8, 989, 1979, None, 900, 8),
        Gpu("b200", "NVIDIA B200 HGX", (10, 0), 178.3, 7.7, 2250, 4500, 9000, 1800, 8),
        Gpu("b300", "NVIDIA B300 HGX", (10, 3), 267.6, 8.0, 2250, 4500, 13125, 1800, 8),
        Gpu("gb200", "NVIDIA GB200", (10, 0), 184.0, 8.0, 2500, 5000, 10000, 1800, 4, 72),
        Gpu("gb300", "NVIDIA GB300", (10, 3), 267.6, 8.0, 2500, 5000, 15000, 1800, 4, 72),
    )
}

# What NVML calls them, longest match first.
NVML_NAMES = {
    "GB300": "gb300",
    "GB200": "gb200",
    "B300": "b300",
    "B200": "b200",
    "H200": "h200",
    "H100": "h100",
}

Architecture = Literal["x86_64", "aarch64"]


@dataclass(frozen=True)
class Instance:
    """A SageMaker AI training instance: GPUs, host and network (AWS's instance pages)."""

    name: str
    gpu: str
    gpus: int
    architecture: Architecture
    host_gib: int
    network_gbps: int
    efa_devices: int

    @property
    def choice(self) -> str:
        """Of the group hardware: 'p6_b200' of ml.p6-b200.48xlarge."""
        return self.name.removeprefix("ml.").partition(".")[0].replace("-", "_")


INSTANCES: dict[str, Instance] = {
    instance.name: instance
    for instance in (
        Instance("ml.p5.48xlarge", "h100", 8, "x86_64", 2048, 3200, 32),
        Instance("ml.p5en.48xlarge", "h200", 8, "x86_64", 2048, 3200, 16),
        Instance("ml.p6-b200.48xlarge", "b200", 8, "x86_64", 2048, 3200, 8),
        Instance("ml.p6-b300.48xlarge", "b300", 8, "x86_64", 4096, 6400, 16),
        Instance("ml.p6e-gb200.36xlarge", "gb200", 4, "aarch64", 960, 3200, 17),
    )
}


def gpu_of_nvml_name(name: str) -> str | None:
    """The key in GPUS of a card as NVML names it ('NVIDIA H200'), or None for an unknown card."""
    words = name.upper().replace("-", " ").split()
    for mark, key in NVML_NAMES.items():
        if mark in words:
            return key
    return None
