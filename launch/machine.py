"""What this machine has: looked up before a plan is made, and compared with one before it starts.

No torch: GPUs come from NVML, the rest from the operating system.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from planning.findings import Finding
from planning.hardware import GIB, GPUS, gpu_of_nvml_name
from planning.plan import Plan
from planning.schema import HardwareConfig


@dataclass(frozen=True)
class Machine:
    """GPUs by NVML's name and memory in GiB; the host's memory in GiB; its cores."""

    gpu_names: tuple[str, ...]
    gpu_memory_gib: float | None
    host_gib: float
    cores: int
    driver: str | None = None

    @property
    def gpu(self) -> str:
        """The key in planning/hardware.py, 'cpu' without a GPU, 'unknown' for another card."""
        if not self.gpu_names:
            return "cpu"
        return gpu_of_nvml_name(self.gpu_names[0]) or "unknown"


def look() -> Machine:
    """This machine. A driver that does not answer counts as no GPU."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0))
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return Machine((), None, host, cores)
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        names = tuple(_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
        memory = min((pynvml.nvmlDeviceGetMemoryInfo(h).total / GIB for h in handles), default=None)
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return Machine(names, memory, host, cores, driver)
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def fill(hardware: HardwareConfig, machine: Machine) -> HardwareConfig:
    """`hardware=this` with what was found in the place of its nulls; others as they are."""
    if hardware.gpu is not None and hardware.gpus_per_node is not None:
        return hardware
    gpu = machine.gpu if machine.gpu in GPUS else "cpu"
    count = 1 if gpu == "cpu" else len(machine.gpu_names)
    memory = machine.host_gib if gpu == "cpu" else None
    return hardware.model_copy(
        update={
            "gpu": hardware.gpu or gpu,
            "gpus_per_node": hardware.gpus_per_node or count,
            "memory_gib": hardware.memory_gib or memory,
        }
    )


def compare(plan: Plan, machine: Machine) -> list[Finding]:
    """Why this machine cannot run the plan: errors of kind `machine`."""
    hardware, found = plan.config.hardware, []

    def cannot(setting: str, message: str, fix: str) -> None:
        found.append(Finding("machine", "error", setting, message, fix, machine=True))

    elsewhere = "take launch=plan to stop after the plan, or the machine that has it"
    if machine.gpu == "unknown":
        cannot(
            "hardware",
            f"the card {machine.gpu_names[0]!r} is not one that plans know "
            f"({', '.join(name for name in GPUS if name != 'cpu')})",
            "name the nearest with hardware.gpu=..., hardware.gpus_per_node=... and "
            "hardware.memory_gib=...",
        )
    elif hardware.gpu != machine.gpu and hardware.gpu != "cpu":
        here = "no GPU" if machine.gpu == "cpu" else f"{machine.gpu}s"
        cannot(
            "hardware", f"the plan is for {hardware.gpu}, and this machine has {here}", elsewhere
        )
    elif hardware.gpu != "cpu" and plan.processes_per_node > len(machine.gpu_names):
        cannot(
            "hardware.gpus_per_node",
            f"{plan.processes_per_node} GPUs planned, {len(machine.gpu_names)} here",
            elsewhere,
        )
    if plan.nodes > 1:
        cannot(
            "hardware.nodes",
            f"launch=local starts one node, and the plan has {plan.nodes}",
            "set hardware.nodes=1, or take another launch",
        )
    return found


def environment(plan: Plan, machine: Machine) -> dict[str, str]:
    """The plan's environment with its policies turned into this machine's paths and numbers."""
    cores = max(1, machine.cores // plan.processes_per_node)
    values = {
        "policy:cores-per-process": str(cores),
        "policy:torch-cudnn": _torch_cudnn(),
    }
    resolved = {name: values.get(value, value) for name, value in plan.environment.items()}
    return {name: value for name, value in resolved.items() if value is not None}


def _torch_cudnn() -> str | None:
    """The folder of the cuDNN that torch itself loads, or None where torch brings none."""
    spec = importlib.util.find_spec("nvidia")
    for parent in spec.submodule_search_locations or [] if spec else []:
        folder = Path(parent) / "cudnn"
        if folder.is_dir():
            return str(folder)
    return None
