"""What this machine has: looked up before a plan is made, and compared with one before it starts.

No torch: GPUs come from NVML, the rest from the operating system.
"""

from __future__ import annotations

import dataclasses

from planning.findings import Finding
from planning.hardware import GPUS, SAME_MEMORY, gpu_of_nvml_name
from planning.plan import Plan
from planning.schema import HardwareConfig
from training import gpus, host
from training.device import ENOUGH_MEMORY, planned_memory_gib


@dataclasses.dataclass(frozen=True)
class Machine:
    """GPUs that a process here sees, by NVML's name, and the memory in GiB of the smallest; the
    host's memory in GiB and its cores, as far as this process may use them."""

    gpu_names: tuple[str, ...]
    gpu_memory_gib: float | None
    host_gib: float
    cores: int
    driver: str | None = None
    problems: tuple[Finding, ...] = ()

    @property
    def gpu(self) -> str:
        """The key in planning/hardware.py, 'cpu' without a GPU, 'unknown' for another card."""
        if not self.gpu_names:
            return "cpu"
        return gpu_of_nvml_name(self.gpu_names[0]) or "unknown"


def look() -> Machine:
    """This machine. What is wrong with its GPUs is in `problems`; nothing is raised."""
    cards = gpus.look()
    names = tuple(card.name for card in cards.visible)
    memory = min((c.memory_gib for c in cards.visible if c.memory_gib is not None), default=None)
    return Machine(names, memory, host.memory_gib(), host.cores(), cards.driver, cards.problems)


def is_known(hardware: HardwareConfig) -> bool:
    """Whether it says what it is, as all but `hardware=this` do."""
    return hardware.gpu is not None and hardware.gpus_per_node is not None


def fill(hardware: HardwareConfig, machine: Machine) -> HardwareConfig:
    """`hardware=this` with what was found in the place of its nulls; others as they are."""
    if is_known(hardware):
        return hardware
    gpu = hardware.gpu or (machine.gpu if machine.gpu in GPUS else "cpu")
    cpu = gpu == "cpu"
    count = 1 if cpu else max(1, len(machine.gpu_names))
    memory = machine.host_gib if cpu else _unusual_memory(gpu, machine)
    return hardware.model_copy(
        update={
            "gpu": gpu,
            "gpus_per_node": hardware.gpus_per_node or count,
            "memory_gib": hardware.memory_gib or memory,
        }
    )


def _unusual_memory(gpu: str, machine: Machine) -> float | None:
    """The memory in GiB of cards whose memory is not what the table says of `gpu`, else None."""
    usual = GPUS[gpu].memory_gib if gpu in GPUS else None  # resolve refuses an unknown one
    found = machine.gpu_memory_gib
    if usual is None or found is None or abs(found / usual - 1) <= SAME_MEMORY:
        return None
    return round(found, 1)


def compare(plan: Plan, machine: Machine) -> list[Finding]:
    """Why this machine cannot run the plan: errors of kind `machine`, and warnings."""
    hardware, found = plan.config.hardware, []
    looked_up = hardware.name == "this"

    def cannot(setting: str, message: str, fix: str) -> None:
        found.append(Finding("machine", "error", setting, message, fix, machine=True))

    elsewhere = "take launch=plan to stop after the plan, or the machine that has it"
    if hardware.gpu != "cpu":
        found += machine.problems
    elif looked_up:  # a CPU is what is left: no reason to refuse, but to say why
        found += [dataclasses.replace(p, severity="warning") for p in machine.problems]
    if machine.gpu == "unknown" and looked_up:
        card = machine.gpu_names[0]
        if hardware.gpu == "cpu":
            cannot(
                "hardware",
                f"the card {card!r} is not one that plans know "
                f"({', '.join(name for name in GPUS if name != 'cpu')})",
                "name the one whose figures are nearest with hardware.gpu=..., or take "
                "hardware=cpu",
            )
        else:
            found.append(
                Finding(
                    "another-card",
                    "warning",
                    "hardware.gpu",
                    f"{card} is taken for {GPUS[hardware.gpu or 'cpu'].title}: speeds and formats "
                    "in the plan are of that card",
                )
            )
    elif hardware.gpu != machine.gpu and hardware.gpu != "cpu":
        here = "no GPU" if machine.gpu == "cpu" else ", ".join(sorted(set(machine.gpu_names)))
        cannot(
            "hardware", f"the plan is for {hardware.gpu}, and this machine has {here}", elsewhere
        )
    if 0 < len(machine.gpu_names) < plan.processes_per_node and hardware.gpu != "cpu":
        cannot(
            "hardware.gpus_per_node",
            f"{plan.processes_per_node} GPUs planned, {len(machine.gpu_names)} here",
            elsewhere,
        )
    planned, memory = planned_memory_gib(plan), machine.gpu_memory_gib
    if (
        hardware.gpu != "cpu"
        and planned is not None
        and memory is not None
        and memory < ENOUGH_MEMORY * planned
    ):
        cannot(
            "hardware.memory_gib",
            f"the plan counts on {planned:.1f} GiB a GPU, and those here have {memory:.1f} GiB",
            "take hardware=this, which looks it up",
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
    return host.environment(plan.environment, plan.processes_per_node, machine.cores)
