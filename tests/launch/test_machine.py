"""hardware=this, plans held against the machine, and what a container allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import machine
from planning.findings import Finding
from planning.plan import Plan
from planning.resolve import resolve
from planning.schema import HardwareConfig
from tests.choices import config
from tests.training.fake_nvml import A2000, H200, FakeNvml, cards, install

THIS = HardwareConfig(
    name="this",
    gpu=None,
    gpus_per_node=None,
    nodes=1,
    instance_type=None,
    memory_gib=None,
    allow_unfused_attention=False,
    price_per_node_hour=None,
)


def of(*names: str, gib: float | None = 140.4, **more: object) -> machine.Machine:
    return machine.Machine(names, gib if names else None, 64.0, 8, **more)  # type: ignore[arg-type]


def filled(found: machine.Machine, **chosen: object) -> tuple[object, ...]:
    hardware = machine.fill(THIS.model_copy(update=chosen), found)
    return hardware.gpu, hardware.gpus_per_node, hardware.memory_gib


def test_looked_up_hardware() -> None:
    assert filled(of()) == ("cpu", 1, 64.0)
    assert filled(of("NVIDIA H200", "NVIDIA H200")) == ("h200", 2, None)
    assert filled(of("NVIDIA H200", "NVIDIA H200"), gpus_per_node=1) == ("h200", 1, None)
    # Another model of the kind, and a part of one: their own memory counts.
    assert filled(of("NVIDIA H100 NVL", gib=93.6)) == ("h100", 1, 93.6)
    assert filled(of("NVIDIA H200 MIG 1g.18gb", gib=16.0)) == ("h200", 1, 16.0)
    # A card that plans do not know, and what a person says it is like.
    assert filled(of("NVIDIA L40S", gib=44.7)) == ("cpu", 1, 64.0)
    assert filled(of("NVIDIA L40S", gib=44.7), gpu="h100") == ("h100", 1, 44.7)
    # Not this machine's memory: the plan is for a GPU that is not here.
    assert filled(of(), gpu="h200") == ("h200", 1, None)


def test_look_takes_the_smallest_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch, FakeNvml(cards(("NVIDIA H100 80GB HBM3", 79.6), ("NVIDIA H100 NVL", 93.6)))
    )
    found = machine.look()
    assert (found.gpu, len(found.gpu_names)) == ("h100", 2)
    assert found.gpu_memory_gib == pytest.approx(79.6)
    install(monkeypatch, FakeNvml(cards(A2000, H200)))
    assert [problem.severity for problem in machine.look().problems] == ["error"]


def plan(*words: str) -> Plan:
    found = resolve(config("model=gpt_160m", "training.global_batch_size=8", *words)).plan
    assert found is not None
    return found


def test_plan_against_machine() -> None:
    h200s = of(*["NVIDIA H200"] * 8)
    two = plan("hardware=h200", "hardware.gpus_per_node=2")
    assert machine.compare(two, h200s) == []

    def messages(a_plan: Plan, found: machine.Machine) -> list[str]:
        return [f"{f.severity}: {f.message}" for f in machine.compare(a_plan, found)]

    assert messages(two, of("NVIDIA H200")) == ["error: 2 GPUs planned, 1 here"]
    assert messages(two, of()) == ["error: the plan is for h200, and this machine has no GPU"]
    assert messages(two, of("NVIDIA B200", "NVIDIA B200", gib=178.4)) == [
        "error: the plan is for h200, and this machine has NVIDIA B200"
    ]
    assert messages(two, of(*["NVIDIA H200"] * 2, gib=70.0)) == [
        "error: the plan counts on 139.8 GiB a GPU, and those here have 70.0 GiB"
    ]
    like = plan("hardware=this", "hardware.gpu=h100", "hardware.gpus_per_node=1",
                "hardware.memory_gib=44.7")  # fmt: skip
    (warning,) = messages(like, of("NVIDIA L40S", gib=44.7))
    assert warning.startswith("warning: NVIDIA L40S is taken for NVIDIA H100 SXM")


def test_problems_refuse_a_gpu_plan_and_warn_a_cpu_plan() -> None:
    lost = Finding("gpus", "error", "hardware", "GPU 1 does not answer", machine=True)
    on_gpu = plan("hardware=h200", "hardware.gpus_per_node=1")
    assert machine.compare(on_gpu, of("NVIDIA H200", problems=(lost,))) == [lost]
    nothing_left = of(problems=(lost,))
    looked_up = plan("hardware=this", "hardware.gpu=cpu", "hardware.gpus_per_node=1")
    assert [f.severity for f in machine.compare(looked_up, nothing_left)] == ["warning"]
    assert machine.compare(plan("hardware=cpu"), nothing_left) == []


def test_environment_names_torchs_cudnn_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/other")
    on_gpu = machine.environment(
        plan("hardware=h200", "hardware.gpus_per_node=1"), of("NVIDIA H200")
    )
    home = Path(on_gpu["CUDNN_HOME"])
    assert list((home / "lib").glob("libcudnn.so.9"))
    assert on_gpu["LD_LIBRARY_PATH"] == f"{home}/lib:/opt/other"
    on_cpu = machine.environment(plan("hardware=cpu"), of())
    assert "LD_LIBRARY_PATH" not in on_cpu
    assert on_cpu["OMP_NUM_THREADS"] == "8"
