"""Stands in for pynvml: a machine's cards, told in the shape of NVML's answers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from planning.hardware import GIB

H200 = ("NVIDIA H200", 140.4)  # 143771 MiB, read on the card
A2000 = ("NVIDIA RTX A2000", 12.0)


class NVMLError(Exception):
    pass


@dataclass
class FakeCard:
    name: str
    gib: float
    uuid: str
    mig: list[FakeCard] | None = None
    lost: bool = False


@dataclass
class FakeNvml:
    cards: list[FakeCard] = field(default_factory=list)
    init_error: str | None = None

    def nvmlInit(self) -> None:
        if self.init_error:
            raise NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.03"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        if self.cards[index].lost:
            raise NVMLError("GPU is lost")
        return self.cards[index]

    def nvmlDeviceGetName(self, card: FakeCard) -> bytes:
        return card.name.encode()  # bytes in older versions of pynvml

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> SimpleNamespace:
        return SimpleNamespace(total=int(card.gib * GIB))

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        if card.name == A2000[0]:
            raise NVMLError("Not Supported")
        return [0, 0] if card.mig is None else [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, index: int) -> FakeCard:
        if card.mig is None or index >= len(card.mig):
            raise NVMLError("Not Found")
        return card.mig[index]


def cards(*models: tuple[str, float]) -> list[FakeCard]:
    """Cards with the UUIDs GPU-0..., GPU-1..., ..."""
    return [
        FakeCard(name, gib, f"GPU-{index}bb6f0c2-0000") for index, (name, gib) in enumerate(models)
    ]


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
