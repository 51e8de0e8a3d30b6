"""What tools/doctor.py reads without torch: the host, packages, cards by NVML, cuDNNs, plug-ins.

A reader returns what it found; what is wrong with it is a Problem beside it.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
OFI_PLUGINS = ("libnccl-net-ofi.so", "libnccl-net.so")
OFI_FOLDERS = (
    *("/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64", "/opt/aws-ofi-nccl/lib"),
    *("/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "/opt/amazon/ofi-nccl/lib/aarch64-linux-gnu"),
    *("/opt/amazon/efa/lib", "/usr/local/lib"),
)


@dataclass(frozen=True)
class Problem:
    severity: Literal["error", "warning"]
    message: str
    fix: str = ""


# --- the host ---------------------------------------------------------------------------------


def cpu(path: Path = Path("/proc/cpuinfo")) -> tuple[str, str]:
    """The CPU's name, and its instructions for BF16 products."""
    values: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        values.setdefault(name.strip(), value.strip())
    flags = values.get("flags", values.get("Features", "")).split()
    known = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "BF16"}
    units = [label for flag, label in known.items() if flag in flags]
    none = "no instructions: products are computed in FP32 and rounded"
    return values.get("model name", platform.machine()), ", ".join(units) or none


def system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    parts = [name, f"Linux {platform.release()}", platform.machine()]
    return ", ".join([*parts, "in a container"] if in_container() else parts)


def in_container() -> bool:
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))


def container_engines() -> str:
    found = [name for name in ("docker", "podman", "enroot", "apptainer") if shutil.which(name)]
    if "docker" in found:
        ask = ["docker", "version", "--format", "{{.Server.Version}}"]
        if not run(ask, timeout=5):
            found[found.index("docker")] = "docker (its daemon does not answer)"
    return ", ".join(found) or "none"


def run(command: list[str], timeout: float) -> str:
    """What a command prints; "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# --- packages ---------------------------------------------------------------------------------


def wanted_versions() -> dict[str, str]:
    """What requirements.lock (==) and the extras of pyproject.toml ask for, by package."""
    found = {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("te", "hybrid"):
        for line in project["optional-dependencies"].get(extra, []):
            name, wanted = re.split(r"(?=[<>=!~])", line, maxsplit=1)
            found[normal(name.partition("[")[0])] = wanted
    lock = (ROOT / "requirements.lock").read_text()
    for name, version in re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==([^\s;\\]+)", lock, re.M):
        found[normal(name)] = f"=={version}"
    return found


def installed_versions() -> dict[str, str]:
    """By package; of two of a name the first on the path, which is the one imported."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        found.setdefault(normal(distribution.metadata["Name"] or ""), distribution.version)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower().strip()


def satisfies(version: str | None, wanted: str) -> bool:
    # A local part such as +cu130 is the same release.
    release = (version or "").partition("+")[0]
    if not release or wanted.startswith("=="):
        return release == wanted.removeprefix("==")
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(release, prereleases=True)


def engine_problems(wanted: Mapping[str, str], installed: Mapping[str, str]) -> Iterator[Problem]:
    """Whether the three packages of Transformer Engine belong together."""
    again = "pip install 'slipway[te]' in a fresh environment"
    parts = [
        name for name in installed if re.fullmatch(r"transformer-engine(-torch|-cu\d+)?", name)
    ]
    if len({installed[name] for name in parts}) > 1:
        listed = ", ".join(f"{name} {installed[name]}" for name in parts)
        yield Problem("error", f"parts of Transformer Engine differ in version: {listed}", again)
    elif parts and not any("-cu" in name for name in parts):
        yield Problem(
            "error", "Transformer Engine's core (transformer-engine-cu13) is missing", again
        )
    for name in ("transformer-engine", "megatron-core"):
        if name in installed and not satisfies(installed[name], wanted[name]):
            yield Problem(
                "error",
                f"{name} {installed[name]} is here, and internals of {wanted[name]} are read",
                f"pip install '{name}{wanted[name]}'",
            )


def torch_cuda() -> str | None:
    """The CUDA that torch is built for, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda[^=]*= *'([^']+)'", text, re.M)
    return found.group(1) if found else None


# --- cards, by NVML ---------------------------------------------------------------------------


class CardReader:
    """One card; what it or its driver does not tell is left out.

    `blocking` holds what keeps CUDA from starting on it, if it does not start.
    """

    def __init__(self, nvml: Any, uuid: str, label: str) -> None:
        self.nvml, self.label = nvml, label
        self.handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self.problems: list[Problem] = []
        self.blocking: list[Problem] = []

    def read(self) -> str:
        parts = [self._memory(), self._capability(), self._power(), self._ecc(), self._mig()]
        self._processes()
        self._rows()
        self._blocks()
        return ", ".join(part for part in [*parts, self._links()] if part)

    def linked(self, other: CardReader) -> bool:
        """Whether NVLink joins the two."""
        index = self.nvml.NVML_P2P_CAPS_INDEX_NVLINK
        status = self._ask("nvmlDeviceGetP2PStatus", other.handle, index)
        return status == self.nvml.NVML_P2P_STATUS_OK

    def _ask(self, name: str, *more: Any) -> Any:
        try:
            return getattr(self.nvml, name)(self.handle, *more)
        except Exception:
            return None

    def _problem(self, severity: Literal["error", "warning"], message: str, fix: str) -> None:
        self.problems.append(Problem(severity, f"{self.label} {message}", fix))

    def _memory(self) -> str:
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        return f"{memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free" if memory else ""

    def _capability(self) -> str:
        capability = self._ask("nvmlDeviceGetCudaComputeCapability")
        return f"compute capability {dotted(capability)}" if capability else ""

    def _power(self) -> str:
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")  # milliwatts
        usual = self._ask("nvmlDeviceGetPowerManagementDefaultLimit")
        if limit and usual and limit < 0.98 * usual:
            less = f"may take {limit // 1000} W of its usual {usual // 1000}, so it is slower"
            self._problem("warning", less, f"nvidia-smi --power-limit={usual // 1000}, as root")
        return f"{limit // 1000} W" if limit else ""

    def _ecc(self) -> str:
        mode = self._ask("nvmlDeviceGetEccMode")
        kind, since = self.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.nvml.NVML_VOLATILE_ECC
        if count := self._ask("nvmlDeviceGetTotalEccErrors", kind, since):
            self._problem(
                "error",
                f"has had {count} memory errors that ECC could not correct",
                "nvidia-smi --gpu-reset or a restart; if they return, the card is broken",
            )
        return "" if mode is None else f"ECC {'on' if mode[0] else 'off'}"

    def _mig(self) -> str:
        mode = self._ask("nvmlDeviceGetMigMode")
        return "" if mode is None else f"MIG {'on' if mode[0] else 'off'}"

    def _links(self) -> str:
        numbers = range(self.nvml.NVML_NVLINK_MAX_LINKS)
        states = [self._ask("nvmlDeviceGetNvLinkState", number) for number in numbers]
        known = [state for state in states if state is not None]
        return f"{sum(map(bool, known))} of {len(known)} NVLinks up" if known else "no NVLink"

    def _processes(self) -> None:
        holding = [
            f"{_process_name(process.pid)} with {process.usedGpuMemory / GIB:.1f} GiB"
            for process in self._ask("nvmlDeviceGetComputeRunningProcesses") or []
            if (process.usedGpuMemory or 0) > GIB
        ]
        if holding:
            fix = "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
            self._problem("warning", f"is in use: {', '.join(holding)}", fix)

    def _rows(self) -> None:
        _, _, pending, failed = self._ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
        if failed:
            self._problem("error", "could not replace broken memory rows", "replace the card")
        elif pending:
            fix = "nvidia-smi --gpu-reset, or a restart"
            self._problem("warning", "replaces broken memory rows at its next reset", fix)

    def _blocks(self) -> None:
        nvml, label = self.nvml, self.label
        if self._ask("nvmlDeviceGetComputeMode") == nvml.NVML_COMPUTEMODE_PROHIBITED:
            fix = "nvidia-smi --compute-mode=DEFAULT, as root"
            self.blocking.append(Problem("error", f"{label} is closed for computing", fix))
        try:
            fabric = nvml.c_nvmlGpuFabricInfo_t()
            nvml.nvmlDeviceGetGpuFabricInfo(self.handle, ctypes.byref(fabric))
        except Exception:
            return
        if fabric.state in (
            nvml.NVML_GPU_FABRIC_STATE_NOT_STARTED,
            nvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS,
        ):
            waits = f"{label} waits for the NVSwitch fabric, without which CUDA does not start"
            fix = "systemctl status nvidia-fabricmanager; its version must be the driver's"
            self.blocking.append(Problem("error", waits, fix))


def _process_name(pid: int) -> str:
    if in_container():  # NVML counts the host's processes
        return f"process {pid} of the host"
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} (process {pid})"
    except OSError:
        return f"process {pid}"


def dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


# --- libraries --------------------------------------------------------------------------------


def cudnn_places(
    environ: Mapping[str, str], torchs: Path | None, toolkit: str = "/usr/local/cuda"
) -> dict[Path, list[str]]:
    """Folders with a libcudnn.so*, and what leads there, in the order in which Transformer Engine
    2.20.2 (transformer_engine/common/__init__.py) and the loader look."""
    found: dict[Path, list[str]] = {}

    def add(source: str, libraries: Iterable[str]) -> None:
        for library in libraries:
            sources = found.setdefault(Path(library).resolve().parent, [])
            if source not in sources:
                sources.append(source)

    variables = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
    roots = {name: environ[name] for name in variables if environ.get(name)} | {toolkit: toolkit}
    for source, root in roots.items():
        libraries = glob.glob(f"{root}/**/libcudnn.so*", recursive=True)
        add(source, [path for path in libraries if "stub" not in path])
    for folder in search_path(environ):
        add("LD_LIBRARY_PATH", glob.glob(f"{folder}/libcudnn.so*"))
    add("ldconfig", ldconfig("libcudnn.so"))
    if torchs is not None:
        add("torch's package", glob.glob(f"{torchs}/libcudnn.so*"))
    return found


def search_path(environ: Mapping[str, str]) -> list[str]:
    return [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]


def ldconfig(prefix: str) -> Iterator[str]:
    """Paths of libraries in the loader's cache."""
    program = shutil.which("ldconfig") or "/sbin/ldconfig"
    for line in run([program, "-p"], timeout=10).splitlines():
        name, _, path = line.partition(" => ")
        if name.strip().startswith(prefix):
            yield path.strip()


def fabric_devices(folder: Path = Path("/sys/class/infiniband")) -> tuple[list[str], list[str]]:
    """EFA devices, and those of InfiniBand or RoCE."""
    names = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
    efa = [name for name in names if (folder / name / "device/driver").resolve().name == "efa"]
    return efa, [name for name in names if name not in efa]


def ofi_plugins(environ: Mapping[str, str]) -> list[Path]:
    """NCCL's network plug-ins that are installed, those first that the loader finds."""
    folders = [*search_path(environ), *OFI_FOLDERS]
    paths = [Path(folder) / name for folder in folders for name in OFI_PLUGINS]
    paths += [Path(path) for name in OFI_PLUGINS for path in ldconfig(name)]
    return list(dict.fromkeys(path.resolve() for path in paths if path.exists()))


def probe_facts(path: Path) -> tuple[dict[str, Any], dict[str, str], str | None]:
    """What doctor_probe.py told: values, errors, and the check that it did not return from."""
    values: dict[str, Any] = {}
    errors: dict[str, str] = {}
    at_work: str | None = None
    for line in path.read_text().splitlines() if path.exists() else ():
        fact = json.loads(line)
        at_work = None
        if "value" in fact:
            values[fact["check"]] = fact["value"]
        elif "error" in fact:
            errors[fact["check"]] = fact["error"]
        else:
            at_work = fact["check"]
    return values, errors, at_work
