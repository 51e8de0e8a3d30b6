"""What NVML says of this node's GPUs: memory in use, formats, errors, NVLink.

NVML API Reference, names as in nvidia-ml-py. A question that a card or driver does not know leaves
None, never an exception.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planning.hardware import GIB


@dataclass(frozen=True)
class Health:
    """One GPU. links: NVLinks that are (up, down); fabric: whether the NVSwitch fabric knows it."""

    index: int
    capability: tuple[int, int] | None
    used_gib: float | None
    memory_errors: int | None  # uncorrected, since the driver was loaded
    reset_pending: bool | None  # memory rows wait for a reset to be replaced
    links: tuple[int, int]
    fabric: bool | None


def look() -> list[Health]:
    """Each GPU that answers; none without NVML."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:
        return []
    try:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = _or_none(lambda i=index: nvml.nvmlDeviceGetHandleByIndex(i))  # type: ignore[misc]
            if handle is not None:
                found.append(_health(nvml, handle, index))
        return found
    finally:
        nvml.nvmlShutdown()


def _health(nvml: Any, handle: Any, index: int) -> Health:
    rows = _or_none(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    capability = _or_none(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Health(
        index,
        tuple(capability) if capability else None,
        _or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB),
        _or_none(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        None if rows is None else bool(rows[2] or rows[3]),
        _links(nvml, handle),
        _or_none(lambda: _fabric(nvml, handle)),
    )


def _links(nvml: Any, handle: Any) -> tuple[int, int]:
    """Of the links that the card has; NVML refuses numbers beyond them."""
    states = []
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        state = _or_none(lambda n=link: nvml.nvmlDeviceGetNvLinkState(handle, n))  # type: ignore[misc]
        if state is not None:
            states.append(bool(state))
    return sum(states), len(states) - sum(states)


def _fabric(nvml: Any, handle: Any) -> bool | None:
    """Registered with the NVSwitches' fabric manager; None where there is no such fabric."""
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    if info.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    return bool(info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == 0)


def _or_none[T](ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Exception:
        return None
