"""What this host offers: memory and cores as far as a container may use them, torch's cuDNN, and a
plan's policies turned into its paths and numbers. Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
GIB = 2**30


def memory_gib() -> float:
    """The memory that this process may use: the machine's, or a container's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, version 1
            value = _read(folder / name).strip()
            if value.isdigit():  # not "max"
                limits.append(int(value))
    return min(limits) / GIB


def cores() -> int:
    """The cores that this process may use: its affinity, or a container's quota of CPU time."""
    limits = [len(os.sched_getaffinity(0))]
    for folder in cgroups("cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not period:
            quota = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit():  # not "max", not -1
            limits.append(max(1, int(quota) // int(period)))
    return min(limits)


def out_of_memory_kills() -> int:
    """How many processes of this control group the kernel has killed for memory (version 2)."""
    counts = [0]
    for folder in cgroups("memory"):
        for line in _read(folder / "memory.events").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                counts.append(int(count))
    return max(counts)


def cgroups(controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, from its own up; a limit holds for all below.

    A container often sees only its own group, mounted as the root: what does not exist is skipped
    by the reader.
    """
    for line in _read(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            roots = [CGROUPS, CGROUPS / "unified"]
        elif controller in controllers.split(","):
            roots = [CGROUPS / controller, CGROUPS / controllers]
        else:
            continue
        for root in roots:
            inner = Path(path.lstrip("/"))
            yield from (root / folder for folder in (inner, *inner.parents))


def torch_cudnn() -> Path | None:
    """The folder of the cuDNN package that torch loads, or None where torch brings none."""
    torch = importlib.util.find_spec("torch")
    nvidia = importlib.util.find_spec("nvidia")
    # torch's libraries look beside torch first (their RPATH), then it searches sys.path.
    parents = [Path(torch.origin).parents[1] / "nvidia"] if torch and torch.origin else []
    parents += [Path(path) for path in (nvidia.submodule_search_locations or [])] if nvidia else []
    return next((path / "cudnn" for path in parents if (path / "cudnn" / "lib").is_dir()), None)


def environment(planned: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """A plan's environment with its policies turned into this host's paths and numbers.

    processes: of this host. A policy that has no value here leaves its variable out.
    """
    cudnn = torch_cudnn()
    values = {
        "policy:cores-per-process": str(max(1, cores // processes)),
        "policy:torch-cudnn": str(cudnn) if cudnn else None,
    }
    resolved = {name: values.get(value, value) for name, value in planned.items()}
    if cudnn and resolved.get("CUDNN_HOME") == str(cudnn):
        # CUDNN_HOME gives Transformer Engine the main library only. On a machine with a CUDA
        # toolkit the loader looks for the others (libcudnn_graph.so.9, ...) itself: it finds none,
        # or those of another version.
        before = os.environ.get("LD_LIBRARY_PATH")
        resolved["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(cudnn / "lib"), before]))
    return {name: value for name, value in resolved.items() if value is not None}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
