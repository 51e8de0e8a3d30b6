"""The network's environment on a node, by instance type: EFA, NCCL's plug-in for it, interfaces.
Standard library only.

Sources: AWS's EFA user guide ("Get started with EFA and NCCL"), aws-ofi-nccl's documentation
(plug-in and tuner), NCCL's (NCCL_NET_PLUGIN, NCCL_SOCKET_IFNAME).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planning.hardware import INSTANCES

# The plug-in's folders in the images of AWS and after the EFA installer, by preference.
PLUGIN_FOLDERS = (
    "opt/amazon/ofi-nccl/lib",
    "opt/amazon/ofi-nccl/lib64",
    "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "opt/amazon/ofi-nccl/lib/aarch64-linux-gnu",
    "opt/amazon/aws-ofi-nccl/lib",
    "opt/aws-ofi-nccl/lib",
    "opt/aws-ofi-nccl/install/lib",
)
# The newer name first; an image may have both, and a libnccl-net.so of another network alone.
PLUGIN_NAMES = ("libnccl-net-ofi.so", "libnccl-net.so")
TUNER_NAMES = ("libnccl-tuner-ofi.so", "libnccl-ofi-tuner.so")
EFA_LIBRARIES = ("opt/amazon/efa/lib64", "opt/amazon/efa/lib")
# Set by older images and launchers. They fix what NCCL and the plug-in choose better by themselves
# on these instances (protocol, buffers, channels), or stand for what libfabric no longer needs.
OBSOLETE = (
    "NCCL_PROTO",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_MIN_CHANNELS",
    "NCCL_MIN_NCHANNELS",
    "RDMAV_FORK_SAFE",
    "FI_EFA_FORK_SAFE",
    "FI_EFA_USE_DEVICE_RDMA",
)
NOT_BETWEEN_HOSTS = "^docker,lo,veth"


@dataclass(frozen=True)
class Network:
    """Variables to set, variables to take away, and what to say of it."""

    environment: dict[str, str]
    unset: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]  # that stop a run over several nodes


def settings(
    instance_type: str | None,
    interface: str | None,
    *,
    nodes: int,
    chosen: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Network:
    """What the workers of a node need to use its network.

    chosen: what the run itself sets: it is kept, and nothing of it is called obsolete. root: of
    the file system, for tests.
    """
    chosen = chosen or {}
    instance = INSTANCES.get(instance_type or "")
    found: dict[str, str] = {}
    notes: list[str] = []
    problems: list[str] = []
    libraries: list[Path] = []
    if (compatibility := cuda_compatibility(root)) is not None:
        libraries.append(compatibility)
        notes.append(f"CUDA's forward compatibility from {compatibility}: the driver is older")
    if nodes > 1:
        # NCCL takes a list of what not to use, gloo one name.
        found["NCCL_SOCKET_IFNAME"] = interface or NOT_BETWEEN_HOSTS
        if interface:
            found["GLOO_SOCKET_IFNAME"] = interface
    if instance is not None and instance.efa_devices:
        found |= {
            "FI_PROVIDER": "efa",
            # A process forked while EFA holds huge pages may hang: data loaders are.
            "FI_EFA_USE_HUGE_PAGE": "0",
        }
        libraries += [root / folder for folder in EFA_LIBRARIES if (root / folder).is_dir()]
        plugin = _first(root, PLUGIN_FOLDERS, PLUGIN_NAMES)
        if plugin is None:
            problems.append(
                f"no NCCL plug-in for EFA in this image (looked for {' and '.join(PLUGIN_NAMES)} "
                f"in /{', /'.join(PLUGIN_FOLDERS)}): NCCL would use TCP, at a fraction of the speed"
            )
        else:
            # Images name plug-ins that cannot drive EFA, so it is named with its path.
            found["NCCL_NET_PLUGIN"] = str(plugin)
            libraries.append(plugin.parent)
            folder = str(plugin.parent.relative_to(root))
            if (tuner := _first(root, (folder,), TUNER_NAMES)) is not None:
                found["NCCL_TUNER_PLUGIN"] = str(tuner)
    if libraries:
        before = chosen.get("LD_LIBRARY_PATH", environ.get("LD_LIBRARY_PATH"))
        paths = [*map(str, libraries), *filter(None, [before])]
        found["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    unset = tuple(name for name in OBSOLETE if name in environ and name not in chosen)
    for name in unset:
        notes.append(f"{name}={environ[name]} is taken away: obsolete on this hardware")
    for name in sorted(set(found) & set(chosen) - {"LD_LIBRARY_PATH"}):
        if found[name] != chosen[name]:
            notes.append(f"{name}={chosen[name]} as the run sets it, not {found[name]}")
        del found[name]
    for name in sorted(set(found) & set(environ) - {"LD_LIBRARY_PATH"}):
        if found[name] != environ[name]:
            notes.append(f"{name}={found[name]} instead of {environ[name]}")
    return Network(found, unset, tuple(notes), tuple(problems))


def _first(root: Path, folders: tuple[str, ...], names: tuple[str, ...]) -> Path | None:
    paths = (root / folder / name for folder in folders for name in names)
    return next((path for path in paths if path.exists()), None)


def cuda_compatibility(root: Path = Path("/")) -> Path | None:
    """The image's folder of CUDA's forward compatibility, if the host's driver is older than it.

    NVIDIA, CUDA Compatibility: a data centre GPU's older driver runs a newer CUDA with the user
    part of the newer driver, which an image brings; with a newer driver it must not be used.
    """
    folder = root / "usr/local/cuda/compat"
    try:
        brought = _version((folder / "libcuda.so.1").resolve(strict=True).name)
        installed = _version((root / "proc/driver/nvidia/version").read_text().splitlines()[0])
    except (OSError, IndexError):
        return None
    return folder if brought and installed and installed < brought else None


def _version(text: str) -> tuple[int, ...]:
    """580.95.05 of libcuda.so.580.95.05, or of the driver's first line about itself."""
    found = re.search(r"\d{3,}(\.\d+)+", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def efa_devices(root: Path = Path("/")) -> list[str]:
    """The EFA devices that this container sees."""
    found = []
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        driver = device / "device" / "driver"
        if driver.exists() and driver.resolve().name == "efa":
            found.append(device.name)
    return found
