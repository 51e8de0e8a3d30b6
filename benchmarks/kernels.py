"""Times of the kernels that a training step is made of, on one GPU.

    python benchmarks/kernels.py OUT [SECTION ...]

Writes OUT/kernels.json: the card and the versions, and a list of rows per section. Every time is
the median of replays of a CUDA graph (of the eager call where it cannot be captured: `eager`), on
random data in buffers that do not stay in the cache. Megatron's and Transformer Engine's own
functions are called where they exist. planning/ takes its curves from this file
(benchmarks/fit.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ |= {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}

import torch

from benchmarks import kernel_blocks, kernel_passes, kernel_products
from benchmarks.kernel_timing import Row, events, random, timed


def device() -> Iterator[Row]:
    """Copies, the sustained GEMM rate against a burst's, and what a launch costs the host."""
    for mib in (64, 512, 4096):
        source = random(mib * 2**19)
        target = torch.empty_like(source)
        row = timed(lambda _, a=source, b=target: b.copy_(a))
        yield {"what": "copy", "bytes": 2 * mib * 2**20} | row
    a, b = random(8192, 8192), random(8192, 8192, scale=0.02)
    out = torch.empty_like(a)
    yield {"what": "matmul 8192^3, burst"} | timed(lambda _: torch.matmul(a, b, out=out))
    ends = time.monotonic() + 3.0
    while time.monotonic() < ends:
        rate = events(lambda: [torch.matmul(a, b, out=out) for _ in range(100)]) / 100
    yield {"what": "matmul 8192^3, after 3 s of it", "s": rate, "eager": True}
    small = random(1024)
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(2000):
            small.add_(1.0)
        host = (time.perf_counter() - began) / 2000
    torch.cuda.synchronize()
    yield {"what": "launch, host", "s": host, "eager": True}


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    f.__name__: f
    for f in (
        device,
        kernel_products.gemm_bf16,
        kernel_products.gemm_fp8_current,
        kernel_products.attention,
        kernel_blocks.blocks,
        kernel_passes.elementwise,
        kernel_passes.optimizer,
        kernel_products.quantize,
        kernel_products.head,
        kernel_passes.compiled,
        kernel_products.gemm_fp8_blockwise,
    )
}  # fmt: skip


def main(out: Path, names: list[str]) -> int:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"],
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/kernels.py OUT",
        "card": torch.cuda.get_device_name(),
        "driver and power limit": driver,
        "cudnn": torch.backends.cudnn.version(),
        "versions": {
            name: version(name)
            for name in ("torch", "transformer-engine", "megatron-core", "nvidia-nccl-cu13")
            if installed(name)
        },
        "sections": {},
        "errors": {},
        "seconds": {},
    }
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    out.mkdir(parents=True, exist_ok=True)
    for name in names or SECTIONS:
        began = time.monotonic()
        rows = result["sections"].setdefault(name, [])
        try:
            for row in SECTIONS[name]():
                rows.append(row)
        except Exception:
            traceback.print_exc()
            result["errors"][name] = traceback.format_exc()[-1500:]
        torch.cuda.empty_cache()
        result["seconds"][name] = round(time.monotonic() - began, 1)
        print(f"{name}: {len(rows)} rows, {result['seconds'][name]} s", flush=True)
        (out / "kernels.json").write_text(json.dumps(result, indent=1))
    return 1 if result["errors"] else 0


def installed(name: str) -> bool:
    try:
        version(name)
    except Exception:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
