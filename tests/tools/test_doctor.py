"""What the doctor reads, what it concludes, and that it really trains on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import doctor_readers as readers
from tools.doctor import Doctor, Report, last_words

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: Xeon\nflags\t\t: fpu avx512_bf16 amx_bf16\n", ("Xeon", "AMX, AVX512-BF16")),
        ("model name\t: Core i7\nflags\t\t: fpu avx2\n",
         ("Core i7", "no instructions: products are computed in FP32 and rounded")),
        ("Features\t: fp asimd bf16\n", (os.uname().machine, "BF16")),
    ],
)  # fmt: skip
def test_cpu(tmp_path: Path, text: str, expected: tuple[str, str]) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert readers.cpu(tmp_path / "cpuinfo") == expected


def test_versions_that_are_wanted() -> None:
    wanted = readers.wanted_versions()
    assert wanted["megatron-core"] == "==0.19.2"
    assert wanted["torch"].startswith("==2.11.")
    assert readers.satisfies("2.11.0+cu130", wanted["torch"])
    assert readers.satisfies("2.20.2", wanted["transformer-engine"])
    assert not readers.satisfies("2.21.0", wanted["transformer-engine"])
    assert not readers.satisfies(None, "==1.0")


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2",
          "transformer-engine-cu13": "2.20.2", "megatron-core": "0.19.2"}, []),
        ({"transformer-engine": "2.20.2", "transformer-engine-cu13": "2.20.1"},
         ["parts of Transformer Engine differ in version: transformer-engine 2.20.2, "
          "transformer-engine-cu13 2.20.1"]),
        ({"transformer-engine": "2.20.2"},
         ["Transformer Engine's core (transformer-engine-cu13) is missing"]),
        ({"megatron-core": "0.18.0"},
         ["megatron-core 0.18.0 is here, and internals of ==0.19.2 are read"]),
    ],
)  # fmt: skip
def test_packages_that_do_not_belong_together(installed: dict[str, str], said: list[str]) -> None:
    found = list(readers.engine_problems(readers.wanted_versions(), installed))
    assert [problem.message for problem in found] == said


def test_cudnns_in_the_order_of_the_search(tmp_path: Path) -> None:
    def library(*parts: str) -> Path:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path.parent

    torchs = library("nvidia", "cudnn", "lib", "libcudnn.so.9")
    toolkit = library("cuda", "targets", "lib", "libcudnn.so.9.10")
    library("cuda", "lib", "stubs", "libcudnn.so")
    own = library("own", "libcudnn.so.9")
    environ = {"CUDNN_HOME": str(torchs.parent), "LD_LIBRARY_PATH": f"{own}:{torchs}:/nowhere"}
    cuda = str(tmp_path / "cuda")
    found = readers.cudnn_places(environ, torchs, toolkit=cuda)
    assert list(found.items())[:3] == [
        (torchs, ["CUDNN_HOME", "LD_LIBRARY_PATH", "torch's package"]),
        (toolkit, [cuda]),
        (own, ["LD_LIBRARY_PATH"]),
    ]


def test_network_devices_and_plugins(tmp_path: Path) -> None:
    for name, driver in (("rdmap0", "efa"), ("rdmap1", "efa"), ("mlx5_0", "mlx5_core")):
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / "ib" / name / "device").mkdir(parents=True)
        (tmp_path / "ib" / name / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert readers.fabric_devices(tmp_path / "ib") == (["rdmap0", "rdmap1"], ["mlx5_0"])
    assert readers.fabric_devices(tmp_path / "none") == ([], [])
    plugin = tmp_path / "libnccl-net-ofi.so"
    plugin.touch()
    assert readers.ofi_plugins({"LD_LIBRARY_PATH": str(tmp_path)})[0] == plugin


class Nvml(SimpleNamespace):
    """One card of an HGX board with trouble, in the shape of NVML's answers."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_NVLINK_MAX_LINKS, NVML_COMPUTEMODE_PROHIBITED = 36, 2

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= 18:
            raise ValueError("Invalid Argument")
        return int(link != 7)

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=140 * GIB, free=100 * GIB),
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetEnforcedPowerLimit": 500_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetComputeMode": 2,
            "nvmlDeviceGetRemappedRows": (0, 1, 1, 0),
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=2**30, usedGpuMemory=39 * GIB),
                SimpleNamespace(pid=2**30 + 1, usedGpuMemory=None),
            ],
        }
        if name not in answers:
            raise AttributeError(name)
        return lambda *_: answers[name]


def test_card() -> None:
    card = readers.CardReader(Nvml(), "GPU-0", "GPU 0")
    assert card.read() == (
        "100.0 of 140.0 GiB free, compute capability 9.0, 500 W, ECC on, MIG off, "
        "17 of 18 NVLinks up"
    )
    said = [f"{problem.severity}: {problem.message}" for problem in card.problems]
    assert said[0] == "warning: GPU 0 may take 500 W of its usual 700, so it is slower"
    assert said[1] == "error: GPU 0 has had 2 memory errors that ECC could not correct"
    assert said[2].startswith("warning: GPU 0 is in use: process 1073741824")
    assert said[2].endswith("with 39.0 GiB")
    assert said[3] == "warning: GPU 0 replaces broken memory rows at its next reset"
    assert [problem.message for problem in card.blocking] == ["GPU 0 is closed for computing"]


def doctor(tmp_path: Path, *choices: str, gpus: tuple[str, ...] = ()) -> Doctor:
    made = Doctor(Report(quiet=True), list(choices), tmp_path)
    made.gpu_names, made.on_gpus = list(gpus), bool(gpus)
    return made


def test_probe_that_crashes_is_a_line(tmp_path: Path) -> None:
    """A torch that ends its process, as a broken driver library does."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os.kill(os.getpid(), 11)\n")
    patient = doctor(tmp_path, gpus=("NVIDIA H200",))
    patient.environment = {"PYTHONPATH": str(tmp_path)}
    patient.libraries()
    (crash, *_) = patient.report.problems
    assert crash.severity == "error"
    assert crash.message.startswith("torch: its process ended (killed by signal 11)")


def test_facts_of_a_probe_that_ended_early(tmp_path: Path) -> None:
    told = tmp_path / "facts"
    lines: list[dict[str, Any]] = [
        {"check": "cuda"}, {"check": "cuda", "value": []},
        {"check": "engine"}, {"check": "engine", "error": "OSError: no"},
        {"check": "attention"},
    ]  # fmt: skip
    told.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert readers.probe_facts(told) == ({"cuda": []}, {"engine": "OSError: no"}, "attention")
    assert readers.probe_facts(tmp_path / "none") == ({}, {}, None)


def test_check_that_breaks_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[str, str]:
        raise OSError("no /proc here")

    monkeypatch.setattr(readers, "cpu", broken)
    patient = doctor(tmp_path)
    patient._guard("host", patient.host)
    patient._guard("disk", patient.disk)
    assert patient.report.rows[0] == ("host", "failed", "OSError: no /proc here")
    assert "/dev/shm" in [name for _, name, _ in patient.report.rows]


# The recipes that Transformer Engine's checks allow; it says no to the others.
FORMATS = {
    "h200": ("bf16", "current"),
    "b200": ("bf16", "current", "mxfp8", "nvfp4"),
    "l40s": ("bf16", "current"),
    "a100": ("bf16",),
}


@pytest.mark.parametrize(
    ("card", "formats", "choices", "expected"),
    [
        ("NVIDIA H200", "h200", [], "fp8"),
        ("NVIDIA B200", "b200", [], "nvfp4"),
        ("NVIDIA B200", "b200", ["precision=mxfp8"], "mxfp8"),
        ("NVIDIA L40S", "l40s", ["hardware.gpu=h100"], "fp8"),
        ("NVIDIA A100-SXM4-80GB", "a100", ["hardware.gpu=h100"], "bf16"),
        (None, None, [], "bf16"),
    ],
)
def test_lowest_precision(
    tmp_path: Path, card: str | None, formats: str | None, choices: list[str], expected: str
) -> None:
    patient = doctor(tmp_path, *choices, gpus=(card,) if card else ())
    able = FORMATS[formats] if formats else ()
    recipes = ("bf16", "current", "mxfp8", "nvfp4")
    patient.facts = {"formats": {name: [name in able, ""] for name in recipes}}
    assert patient._best_precision() == expected


@pytest.mark.parametrize(
    ("result", "status", "exit_status", "said"),
    [
        ({"status": "done", "attention_backend": "fused"}, 0, 0, ""),
        (
            {"status": "done", "attention_backend": "unfused"},
            0,
            1,
            "trained with unfused attention",
        ),
        ({"status": "done", "attention_backend": None}, 0, 1, "trained with unknown attention"),
        ({"status": "failed", "message": "hardware: no such GPU\n    x"}, 3, 1, "no such GPU"),
        ({}, 2, 1, "failed with status 2: layout: it does not fit"),
    ],
)
def test_verdict_on_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    result: dict[str, Any],
    status: int,
    exit_status: int,
    said: str,
) -> None:
    patient = doctor(tmp_path, gpus=("NVIDIA H200",))

    def train(run_dir: Path, *_: Any) -> subprocess.CompletedProcess[str]:
        run_dir.mkdir()
        numbers = {"steps": 4, "median_step_s": 0.05}
        (run_dir / "result.json").write_text(json.dumps(result and numbers | result))
        return subprocess.CompletedProcess(
            [], status, "", "error: layout: it does not fit\n    x\n"
        )

    monkeypatch.setattr(patient, "_train", train)
    patient.training(timeout=1)
    assert patient.report.exit_status == exit_status
    assert said in " ".join(problem.message for problem in patient.report.problems)
    assert bool(said) == bool(patient.report.problems)


def test_an_error_elsewhere_is_not_a_machine_that_trains() -> None:
    report = Report(quiet=True, trained=True)
    report.warning("slow")
    assert report.exit_status == 0
    report.error("a lost card")
    assert report.exit_status == 1


def test_last_words() -> None:
    done = subprocess.CompletedProcess([], 2, "plan ...", "error: a: b\n    do c\nerror: d\n")
    assert last_words(done) == "a: b"
    assert last_words(subprocess.CompletedProcess([], 1, "x\nlast\n", "")) == "last"


def test_trains_on_a_cpu(tmp_path: Path) -> None:
    """The whole command, as a person without a GPU runs it."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--json"],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["problems"]
    assert found["trained"] is True
    assert found["facts"]["training"]["steps"] == 2
    assert found["facts"]["training"]["final_loss"] > 0
    assert found["table"]["GPUs"]["visible"] == "none, with CUDA_VISIBLE_DEVICES="
    assert found["table"]["what works here"]["training on the CPU"].startswith("yes")
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
