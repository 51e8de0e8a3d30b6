"""The bandwidth of an all-reduce over all ranks of a torchrun: -m container.allreduce REPORT.json

Bus bandwidth as NCCL's own tests define it (doc/PERFORMANCE.md of nccl-tests): what each rank sends
and receives, 2 (n - 1) / n bytes for each byte of the buffer, so that figures of any n compare
with a link's speed. Rank 0 writes the report. On a CPU it goes over gloo, with a small buffer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from training.orphans import die_with_parent

die_with_parent()  # before the long import

import torch
import torch.distributed as dist

BYTES = 2**29  # of the buffer on a GPU: a gradient bucket's order of magnitude
CPU_BYTES = 2**20
WARM_UP, MEASURED = 5, 20


def main(report: Path) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=60))
    size, rank = dist.get_world_size(), dist.get_rank()
    nbytes = BYTES if gpu else CPU_BYTES
    buffer = torch.full((nbytes // 4,), float(rank + 1), device=device)
    dist.all_reduce(buffer)
    expected = size * (size + 1) / 2
    right = bool((buffer == expected).all())  # small whole numbers: exact
    buffer.zero_()
    for _ in range(WARM_UP):
        dist.all_reduce(buffer)
    if gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(MEASURED):
        dist.all_reduce(buffer)
    if gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / MEASURED
    verdicts: list[bool | None] = [None] * size
    dist.all_gather_object(verdicts, right)
    if rank == 0:
        speed = 2 * (size - 1) / size * nbytes / seconds / 1e9
        wrong = [number for number, verdict in enumerate(verdicts) if not verdict]
        report.write_text(json.dumps({"gb_s": speed, "ranks": size, "wrong": wrong}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
