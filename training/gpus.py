"""The GPUs that CUDA shows to a process started here, by NVML: neither torch nor a CUDA context.

Rules of CUDA_VISIBLE_DEVICES: CUDA C++ Programming Guide, environment variables. MIG: a process
sees one instance (Multi-Instance GPU User Guide, CUDA device enumeration).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planning.findings import Finding
from planning.hardware import GIB, gpu_of_nvml_name

NVIDIA = "0x10de"  # PCI vendor
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Card:
    """A GPU, or an instance of one that is divided by MIG, with memory in GiB if NVML tells it."""

    uuid: str
    name: str
    memory_gib: float | None

    @property
    def kind(self) -> str:
        """Equal for cards that may train together: the key in planning/hardware.py, or a name."""
        return gpu_of_nvml_name(self.name) or self.name


@dataclass(frozen=True)
class Cards:
    """What a process sees, in its order, and what is wrong with it."""

    visible: tuple[Card, ...] = ()
    driver: str | None = None
    problems: tuple[Finding, ...] = ()


@dataclass
class _Physical:
    """A GPU of the machine in NVML's order, that of the PCI bus."""

    card: Card
    instances: list[Card] | None = None  # None: MIG is off


@dataclass
class _Reading:
    gpus: dict[int, _Physical] = field(default_factory=dict)  # by index, without those that fail
    problems: list[Finding] = field(default_factory=list)

    def problem(self, severity: Any, message: str, fix: str) -> None:
        self.problems.append(Finding("gpus", severity, "hardware", message, fix, machine=True))


def look(environ: Mapping[str, str] = os.environ) -> Cards:
    """The visible cards. A driver that does not answer counts as no GPU, with a problem if the
    machine has a card that it should serve."""
    reading = _Reading()
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError as error:
        reading.problem("error", f"GPUs are looked up with nvidia-ml-py: {error}", "make setup")
        return Cards(problems=tuple(reading.problems))
    except Exception as error:
        if has_nvidia_device():
            reading.problem(
                "error",
                f"there is an NVIDIA card, but its driver does not answer ({error})",
                "install the driver, or restart the machine if it was updated (nvidia-smi must "
                "list the card); in a container, start it with the GPUs (docker run --gpus all)",
            )
        return Cards(problems=tuple(reading.problems))
    try:
        driver = _or_none(lambda: text(nvml.nvmlSystemGetDriverVersion()))
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                reading.gpus[index] = _physical(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
            except Exception as error:
                reading.problem(
                    "error",
                    f"GPU {index} does not answer ({error})",
                    "see the kernel's log (dmesg | grep -i xid), reset it with nvidia-smi "
                    "--gpu-reset or restart the machine",
                )
        visible = _visible(reading, environ)
        return Cards(tuple(visible), driver, tuple(reading.problems))
    except Exception as error:
        reading.problem("error", f"the NVIDIA driver fails ({error})", "nvidia-smi must work")
        return Cards(problems=tuple(reading.problems))
    finally:
        nvml.nvmlShutdown()


def has_nvidia_device() -> bool:
    """Whether the PCI bus has an NVIDIA GPU (classes 0x03....), whatever the driver says."""
    for device in PCI.glob("*") if PCI.is_dir() else ():
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        if vendor.strip() == NVIDIA and kind.startswith("0x03"):
            return True
    return False


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _or_none[T](read: Callable[[], T]) -> T | None:
    """What NVML answers, or None where this card or driver does not know it."""
    try:
        return read()
    except Exception:
        return None


def _physical(nvml: Any, handle: Any) -> _Physical:
    card = _card(nvml, handle)
    mode = _or_none(lambda: nvml.nvmlDeviceGetMigMode(handle))
    if not mode or mode[0] != 1:
        return _Physical(card)
    by_index = functools.partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle)
    numbers = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    found = [_or_none(functools.partial(by_index, number)) for number in numbers]
    return _Physical(card, [_card(nvml, instance) for instance in found if instance is not None])


def _card(nvml: Any, handle: Any) -> Card:
    memory = _or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total / GIB)
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    return Card(text(uuid), text(name), memory)


def _visible(reading: _Reading, environ: Mapping[str, str]) -> list[Card]:
    """The cards of CUDA_VISIBLE_DEVICES in its order, all without it; problems are added."""
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        chosen = list(reading.gpus.values())
        found = [card for gpu in chosen for card in _devices(gpu, reading)]
    else:
        found = _listed(variable, reading)
    instances = {card.uuid for gpu in reading.gpus.values() for card in gpu.instances or ()}
    if (first := next((card for card in found if card.uuid in instances), None)) is not None:
        if len(found) > 1:
            reading.problem(
                "warning",
                f"MIG is on: of {len(found)} devices CUDA shows a process one instance, "
                f"{first.name}",
                "turn MIG off (nvidia-smi -mig 0) to train on whole GPUs",
            )
        return [first]
    _judge_mixture(found, variable, reading, environ)
    return found


def _devices(gpu: _Physical, reading: _Reading) -> list[Card]:
    if gpu.instances is None:
        return [gpu.card]
    if not gpu.instances:
        reading.problem(
            "error",
            f"MIG is on for {gpu.card.name} ({gpu.card.uuid}) and it has no instance",
            "create one (nvidia-smi mig -cgi ... -C), or turn MIG off (nvidia-smi -mig 0)",
        )
    return gpu.instances


def _listed(variable: str, reading: _Reading) -> list[Card]:
    """CUDA reads the list up to the first word that names no device, and takes none if one is
    named twice."""
    found: list[Card] = []
    words = [word.strip() for word in variable.split(",")]
    for word in words:
        named = _named(word, reading)
        if named is None:
            if word not in ("", "-1", "NoDevFiles"):  # customary for "none"
                reading.problem(
                    "warning",
                    f"CUDA_VISIBLE_DEVICES={variable}: no device is {word!r}, and CUDA ignores it "
                    "and what follows",
                    "nvidia-smi -L lists the devices",
                )
            break
        if any(card in found for card in named):
            reading.problem(
                "error",
                f"CUDA_VISIBLE_DEVICES={variable} names a device twice, and CUDA shows none then",
                "name each once",
            )
            return []
        found += named
    return found


def _named(word: str, reading: _Reading) -> list[Card] | None:
    """The devices of an index or a UUID (its first characters do); None if it names none."""
    if word.isdigit():
        gpu = reading.gpus.get(int(word))
        return None if gpu is None else _devices(gpu, reading)[:1]
    if word.startswith("MIG-"):
        same = [c for g in reading.gpus.values() for c in g.instances or () if c.uuid == word]
        return same or None
    if word.startswith("GPU-"):
        gpus = [gpu for gpu in reading.gpus.values() if gpu.card.uuid.startswith(word)]
        return _devices(gpus[0], reading)[:1] if len(gpus) == 1 else None
    return None


def _judge_mixture(
    found: list[Card], variable: str | None, reading: _Reading, environ: Mapping[str, str]
) -> None:
    """A run needs cards of one kind, and to know which cards it gets."""
    kinds = {card.kind for card in found}
    all_kinds = {gpu.card.kind for gpu in reading.gpus.values()}
    if len(kinds) > 1:
        best = max(found, key=lambda card: card.memory_gib or 0)
        alike = ",".join(card.uuid for card in found if card.kind == best.kind)
        names = ", ".join(sorted({card.name for card in found}))
        reading.problem(
            "error",
            f"the GPUs differ ({names}), and a run needs cards of one kind",
            f"choose with CUDA_VISIBLE_DEVICES={alike}",
        )
    elif (
        found
        and len(all_kinds) > 1
        and not (variable or "").startswith("GPU-")
        and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        alike = ",".join(card.uuid for card in found)
        reading.problem(
            "error",
            f"CUDA_VISIBLE_DEVICES={variable}: CUDA counts the fastest card first and nvidia-smi "
            "by the bus, so that a number may mean another card",
            f"set CUDA_DEVICE_ORDER=PCI_BUS_ID, or CUDA_VISIBLE_DEVICES={alike}",
        )
