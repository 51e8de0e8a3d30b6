"""Which cards CUDA would show, from what NVML and the environment say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.fake_nvml import A2000, H200, FakeCard, FakeNvml, cards, install
from training import gpus


def seen(found: gpus.Cards) -> str:
    """The visible cards by the digit of their UUIDs."""
    return "".join(card.uuid[4] for card in found.visible)


@pytest.mark.parametrize(
    ("variable", "expected", "said"),
    [
        (None, "0123", ""),
        ("2,0", "20", ""),
        (" 3 , 1 ", "31", ""),
        ("GPU-2bb6f0c2-0000,GPU-1", "21", ""),  # the first characters of a UUID do
        ("", "", ""),
        ("-1", "", ""),
        ("0,2,-1,1", "02", ""),
        ("0,7,1", "0", "no device is '7'"),
        ("1,GPU-9", "1", "no device is 'GPU-9'"),
        ("GPU-", "", "no device is 'GPU-'"),  # more than one
        ("1,1", "", "names a device twice"),
    ],
)
def test_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: str, said: str
) -> None:
    install(monkeypatch, FakeNvml(cards(H200, H200, H200, H200)))
    found = gpus.look({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable})
    assert seen(found) == expected
    assert found.driver == "580.159.03"
    assert said in "".join(problem.message for problem in found.problems)
    assert bool(said) == bool(found.problems)


def test_cards_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml(cards(A2000, H200, H200)))
    (problem,) = gpus.look({}).problems
    assert "NVIDIA H200, NVIDIA RTX A2000" in problem.message
    chosen = "GPU-1bb6f0c2-0000,GPU-2bb6f0c2-0000"
    assert problem.fix == f"choose with CUDA_VISIBLE_DEVICES={chosen}"
    found = gpus.look({"CUDA_VISIBLE_DEVICES": chosen})
    assert (seen(found), found.problems) == ("12", ())
    # CUDA's number 0 may be an H200 here, NVML's is not.
    (problem,) = gpus.look({"CUDA_VISIBLE_DEVICES": "1,2"}).problems
    assert "a number may mean another card" in problem.message
    by_bus = {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpus.look(by_bus).problems == ()


def test_mig_shows_one_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [FakeCard(f"NVIDIA H200 MIG {i}g", 17.4 * i, f"MIG-{i}") for i in (1, 3)]
    whole, divided = cards(H200, H200)
    divided.mig = slices
    install(monkeypatch, FakeNvml([divided, whole]))
    found = gpus.look({})
    assert [(card.name, card.memory_gib) for card in found.visible] == [
        ("NVIDIA H200 MIG 1g", pytest.approx(17.4))
    ]
    assert "CUDA shows a process one instance" in found.problems[0].message
    found = gpus.look({"CUDA_VISIBLE_DEVICES": "MIG-3"})
    assert [card.uuid for card in found.visible] == ["MIG-3"]
    assert found.problems == ()
    divided.mig = []
    assert "has no instance" in gpus.look({"CUDA_VISIBLE_DEVICES": "0"}).problems[0].message


def test_driver_without_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml([]))
    assert gpus.look({}) == gpus.Cards((), "580.159.03", ())


def test_lost_card(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeNvml(cards(H200, H200))
    machine.cards[1].lost = True
    install(monkeypatch, machine)
    found = gpus.look({})
    assert seen(found) == "0"
    assert found.problems[0].message == "GPU 1 does not answer (GPU is lost)"


@pytest.mark.parametrize(("vendor", "said"), [("0x10de", 1), ("0x8086", 0)])
def test_driver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, said: int
) -> None:
    install(monkeypatch, FakeNvml(init_error="Driver Not Loaded"))
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text("0x030200\n")
    monkeypatch.setattr(gpus, "PCI", tmp_path)
    found = gpus.look({})
    assert found.visible == ()
    assert len(found.problems) == said
    assert all("Driver Not Loaded" in problem.message for problem in found.problems)
