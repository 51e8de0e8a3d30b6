"""Node checks against machines that are told by fakes; the all-reduce is a real one."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from container import checks, gpu_health, preflight
from container.checks import Row
from tests.choices import config
from tests.container.hosts import plan_text
from tests.training.fake_nvml import A2000, H200, FakeCard, FakeNvml, NVMLError, cards, install
from training import torchrun

P6 = "ml.p6-b200.48xlarge"
B200 = ("NVIDIA B200", 178.4)


class FakeNode(FakeNvml):
    """HGX cards with 18 links each; `down`, `errors` and `used` by index."""

    NVML_NVLINK_MAX_LINKS = 36
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_GPU_FABRIC_STATE_NOT_SUPPORTED = 0
    NVML_GPU_FABRIC_STATE_COMPLETED = 3

    class c_nvmlGpuFabricInfo_t(ctypes.Structure):
        _fields_ = [("status", ctypes.c_uint), ("state", ctypes.c_ubyte)]

    def __init__(self, found: list[FakeCard], capability: tuple[int, int], **unusual: Any) -> None:
        super().__init__(found)
        self.capability, self.unusual = capability, unusual

    def _of(self, kind: str, card: FakeCard, usual: Any) -> Any:
        return self.unusual.get(kind, {}).get(self.cards.index(card), usual)

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        return self.capability

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> SimpleNamespace:
        used = self._of("used", card, 0.5)
        return SimpleNamespace(total=int(card.gib * 2**30), used=int(used * 2**30))

    def nvmlDeviceGetTotalEccErrors(self, card: FakeCard, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return self._of("errors", card, 0)

    def nvmlDeviceGetRemappedRows(self, card: FakeCard) -> tuple[int, int, int, int]:
        return (0, 0, self._of("pending", card, 0), 0)

    def nvmlDeviceGetNvLinkState(self, card: FakeCard, link: int) -> int:
        if link >= 18:
            raise NVMLError("Invalid Argument")
        return int(link >= self._of("down", card, 0))

    def nvmlDeviceGetGpuFabricInfo(self, card: FakeCard, pointer: Any) -> None:
        pointer._obj.state = self._of("fabric", card, 3)


def states(rows: Any) -> dict[str, str]:
    return {row.check: row.state for row in rows}


def said(rows: Any, check: str) -> str:
    return next(row.found for row in rows if row.check == check)


def node(monkeypatch: pytest.MonkeyPatch, *models: Any, **unusual: Any) -> None:
    install(monkeypatch, FakeNode(cards(*models), (10, 0), **unusual))


def test_a_whole_node_is_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    node(monkeypatch, *[B200] * 8)
    from planning.resolve import resolve

    plan = resolve(config("model=gpt_8b", "precision=nvfp4", "hardware=p6_b200")).plan
    rows = [*checks.gpus("b200", 8, plan)]
    assert states(rows) == {
        "GPUs": "ok",
        "memory": "ok",
        "memory errors": "ok",
        "formats": "ok",
        "NVLink": "ok",
    }
    assert said(rows, "GPUs") == "8 x NVIDIA B200, driver 580.159.03"
    assert said(rows, "NVLink") == "18 links up on each GPU"
    install(monkeypatch, FakeNode(cards(*[B200] * 8), (9, 0)))
    assert states(checks.gpus("b200", 8, plan))["formats"] == "FAIL"


@pytest.mark.parametrize(
    ("models", "unusual", "check", "state", "found"),
    [
        ([B200] * 7, {}, "GPUs", "FAIL", "7 x NVIDIA B200; wanted 8"),
        ([H200] * 8, {}, "GPUs", "FAIL", "NVIDIA H200; wanted b200, which GPU 0, 1, 2, 3"),
        ([("NVIDIA B200", 90.0)] * 8, {}, "memory", "FAIL", "90.0 GiB a GPU; a b200 has 178.3"),
        ([B200] * 8, {"used": {3: 60.0}}, "memory in use", "warn", "60.0 GiB of GPU 3"),
        ([B200] * 8, {"errors": {5: 2}}, "memory errors", "FAIL", "GPU 5: 2 uncorrected errors"),
        ([B200] * 8, {"pending": {1: 1}}, "memory errors", "FAIL", "rows to be replaced"),
        ([B200] * 8, {"down": {2: 4}}, "NVLink", "FAIL", "GPU 2: 14 of 18 links up"),
        ([B200] * 8, {"fabric": {0: 2}}, "NVLink", "FAIL", "GPU 0: 18 of 18 links up, not registe"),
        ([B200] * 8, {"down": dict.fromkeys(range(8), 18)}, "NVLink", "FAIL", "0 of 18 links up"),
    ],
)
def test_what_is_wrong_with_cards(
    monkeypatch: pytest.MonkeyPatch,
    models: list[Any],
    unusual: dict[str, Any],
    check: str,
    state: str,
    found: str,
) -> None:
    node(monkeypatch, *models, **unusual)
    rows = [*checks.gpus("b200", 8, None)]
    assert states(rows)[check] == state
    assert found in said(rows, check)


def test_a_card_that_answers_nothing_more_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml(cards(A2000)))
    (health,) = gpu_health.look()
    assert (health.capability, health.memory_errors, health.links) == (None, None, (0, 0))
    assert states(checks.gpus(None, None, None)) == {"GPUs": "ok", "memory": "ok", "NVLink": "-"}


def efa_node(root: Path, devices: int, tool: str) -> Path:
    (root / "drivers" / "efa").mkdir(parents=True)
    for number in range(devices):
        device = root / "sys/class/infiniband" / f"rdmap{number}s0" / "device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(root / "drivers" / "efa")
    plugin = root / "opt/amazon/ofi-nccl/lib64/libnccl-net.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    fi_info = root / "opt/amazon/efa/bin/fi_info"
    fi_info.parent.mkdir(parents=True)
    fi_info.write_text(f"#!/bin/sh\n{tool}\n")
    fi_info.chmod(0o755)
    return root


OFFERS_EFA = "printf 'provider: efa\\n    fabric: efa\\n    domain: rdmap0s0-rdm\\n'"


@pytest.mark.parametrize(
    ("devices", "tool", "expected"),
    [
        (8, OFFERS_EFA, {"EFA": "ok", "NCCL plug-in": "ok", "libfabric": "ok"}),
        (7, OFFERS_EFA, {"EFA": "FAIL", "NCCL plug-in": "ok", "libfabric": "ok"}),
        (8, "echo 'fi_getinfo: -61' >&2; exit 61", {"EFA": "ok", "NCCL plug-in": "ok",
                                                    "libfabric": "FAIL"}),
    ],
)  # fmt: skip
def test_efa(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    devices: int,
    tool: str,
    expected: dict[str, str],
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (-1, -1))
    rows = [*checks.efa(P6, 2, efa_node(tmp_path, devices, tool))]
    assert states(rows) == expected


def test_too_little_locked_memory_stops_several_nodes_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (65536, 65536))
    root = efa_node(tmp_path, 8, OFFERS_EFA)
    assert states(checks.efa(P6, 2, root))["locked memory"] == "FAIL"
    assert states(checks.efa(P6, 1, root))["locked memory"] == "warn"


def test_host_memory_must_hold_what_a_save_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    from planning.resolve import resolve

    plan = resolve(config("model=gpt_8b", "precision=bf16", "hardware=h200", "layout=ddp")).plan
    monkeypatch.setattr(checks.this_host, "memory_gib", lambda: 512.0)
    assert states(checks.host(None, plan, None))["host memory"] == "FAIL"  # 8 ranks x 12 x 8 B
    assert states(checks.host(None, None, None))["host memory"] == "ok"
    assert states(checks.host(None, plan, "ml.p6-b200.48xlarge"))["host memory"] == "FAIL"
    monkeypatch.setattr(checks.this_host, "memory_gib", lambda: 1024.0)
    assert states(checks.host(None, plan, "ml.p6-b200.48xlarge"))["host memory"] == "warn"


def test_shared_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = SimpleNamespace(free=4 * 2**30)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage)
    assert checks.shared_memory(4).state == "ok"
    assert checks.shared_memory(8) == Row(
        "shared memory", "FAIL", "/dev/shm has 4 GiB free, 8 ranks need 8: docker run --shm-size"
    )
    from planning.resolve import resolve

    plan = resolve(config("model=gpt_1b", "precision=bf16", "hardware=h200")).plan
    rows = [*checks.folder(tmp_path / "run", plan)]
    assert states(rows)["disk"] == "FAIL"  # 1.2 B parameters x 14 bytes, times 3
    assert [*(tmp_path / "run").iterdir()] == []
    usage.free = 10**12
    assert states(checks.folder(tmp_path / "run", plan))["disk"] == "ok"


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (row,) = checks.folder(tmp_path / "file" / "run", None)
    assert row.state == "FAIL"
    assert "Not a directory" in row.found


def test_a_clock_before_the_image_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.clock().state in ("ok", "warn")
    monkeypatch.setattr(checks.time, "time", lambda: 1e9)
    assert checks.clock().state == "FAIL"


@pytest.mark.parametrize(
    ("found", "network", "state", "text"),
    [
        ({"gb_s": 700.0, "providers": [], "networks": []}, False, "ok", "700 GB/s over 8 ranks"),
        ({"gb_s": 90.0, "providers": [], "networks": []}, False, "FAIL", "at least 100 expected"),
        ({"gb_s": 350.0, "providers": ["efa"], "networks": []}, True, "ok", "ranks, efa (at"),
        ({"gb_s": 350.0, "providers": [], "networks": ["Socket"]}, True, "FAIL", "not over EFA"),
        ({"error": "no result within 50 s"}, True, "FAIL", "no result within 50 s"),
        ({"wrong": [3], "gb_s": 700.0}, False, "FAIL", "wrong sums on rank 3"),
    ],
)
def test_an_all_reduce_is_judged_by_speed_transport_and_sums(
    found: dict[str, Any], network: bool, state: str, text: str
) -> None:
    row = checks._judge("all-reduce", {"wrong": [], "ranks": 8} | found, 100, network=network)
    assert row.state == state
    assert text in row.found


def test_the_all_reduce_probe_runs_and_its_sums_are_right() -> None:
    found = checks._probe(2, torchrun.alone())
    assert found["ranks"] == 2, found
    assert found["wrong"] == []
    assert found["gb_s"] > 0


def test_on_a_cpu_the_table_says_what_it_cannot_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_text("model=gpt_tiny", "precision=fp32", "hardware=cpu"))
    report = tmp_path / "report.json"
    words = ["--gpu", "cpu", "--gpus", "1", "--plan", str(plan), "--run-dir", str(tmp_path / "run")]
    assert preflight.main([*words, "--json", str(report)]) == 0
    table = capsys.readouterr().out
    assert "none failed" in table
    assert "no GPU here: cards, formats, memory and NVLink are not checked" in table
    assert "no GPU here: NCCL is not measured" in table
    assert json.loads(report.read_text())["failed"] == []


def test_a_failure_is_the_exit_status_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node(monkeypatch, *[B200] * 7)
    report = tmp_path / "report.json"
    assert preflight.main(["--gpu", "b200", "--gpus", "8", "--json", str(report)]) == 3
    assert "node check, 0 s: 1 failed" in capsys.readouterr().out
    assert json.loads(report.read_text())["failed"] == ["GPUs: 7 x NVIDIA B200; wanted 8"]


def test_a_mistyped_card_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        preflight.main(["--gpu", "b20"])
    assert ended.value.code == 2
    assert "did you mean b200?" in capsys.readouterr().err
