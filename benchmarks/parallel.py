"""Links and parallel layouts on the GPUs of one node.

    python benchmarks/parallel.py OUT [--seconds 400] [NAME ...]

First NCCL's collectives by size (OUT/links.json), then steps of launch/train.py under each kind of
parallelism (OUT/parallel.jsonl; all cases without NAME). Random tokens; medians of the steps after
the fourth. After --seconds no new case starts. benchmarks/throughput_model.py compares.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS, WARM_UP = 14, 4
SIZES = [2**n for n in range(18, 32)]  # bytes: 256 KiB to 2 GiB
REPEATS = 20
EIGHT_OF_8B = "model=llama3_8b model.num_layers=8 training.global_batch_size=16"
# Most wanted first.
CASES = {
    "ddp": f"{EIGHT_OF_8B} precision=bf16 layout=ddp",
    "tp2": f"{EIGHT_OF_8B} precision=bf16 layout=tp2",
    "fsdp": f"{EIGHT_OF_8B} precision=bf16 layout=fsdp",
    "tp4-fp8": f"{EIGHT_OF_8B} precision=fp8 layout=tp4",
    "pp2": f"{EIGHT_OF_8B} precision=bf16 layout=pp2",
    "cp2": f"{EIGHT_OF_8B} precision=bf16 layout=cp2",
    "ddp-fp8": f"{EIGHT_OF_8B} precision=fp8 layout=ddp",
    "fsdp-fp8": f"{EIGHT_OF_8B} precision=fp8 layout=fsdp",
    "tp2-pp2": f"{EIGHT_OF_8B} precision=bf16 layout=tp2_pp2",
    "ep4": "model=moe_8x1b model.num_layers=4 training.global_batch_size=16 precision=bf16 "
    "layout=ep8 layout.expert_parallel=4",
    "ddp-open": f"{EIGHT_OF_8B} precision=bf16 layout=ddp layout.overlap=false "
    "training.global_batch_size=4",
}
COMMON = "data=mock checkpoint.save=false training.eval_interval=0 logging.tensorboard=false"


def main(out: Path, names: list[str], seconds: float) -> int:
    import torch

    began, gpus = time.monotonic(), torch.cuda.device_count()
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([*torchrun(gpus), __file__, str(out), "--links"], check=False)
    with (out / "parallel.jsonl").open("a") as results:
        for name in names or CASES:
            if time.monotonic() - began > seconds:
                break
            record = measure(name, gpus, out / "runs" / name)
            results.write(json.dumps(record) + "\n")
            results.flush()
            said = f"{record['step_s'] * 1e3:.1f} ms" if "step_s" in record else record["error"]
            print(f"{name:<10} {said} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def torchrun(gpus: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(gpus)]  # fmt: skip


def measure(name: str, gpus: int, run_dir: Path) -> dict[str, Any]:
    words = [*CASES[name].split(), *COMMON.split(), f"training.train_steps={STEPS}"]
    command = [sys.executable, str(ROOT / "launch/train.py"), *words, f"run_dir={run_dir}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    record: dict[str, Any] = {
        "name": f"{gpus} x H200, {name}",
        "overrides": [*words, "hardware=h200", f"hardware.gpus_per_node={gpus}"],
        "fit": False,
    }
    metrics = run_dir / "metrics.jsonl"
    lines = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else []
    steps = [line for line in lines if "step_s" in line and line["step"] > WARM_UP]
    if done.returncode or not steps:
        return record | {"error": (done.stderr + done.stdout)[-500:]}
    times = [line["step_s"] for line in steps]
    return record | {
        "timed": True,
        "step_s": statistics.median(times),
        "times": times,
        "memory_gib": max(line["memory_gib"] for line in steps),
    }


def links(out: Path) -> None:
    """One rank of torchrun: seconds of collectives by the bytes of the whole tensor."""
    import os

    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    rows: list[dict[str, Any]] = []
    for total in SIZES:
        whole = torch.randn(total // 2, device="cuda").bfloat16()
        part = torch.empty(whole.numel() // size, dtype=whole.dtype, device="cuda")
        other = torch.empty_like(whole)
        kinds = {
            "all-gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p),
            "reduce-scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w),
            "all-reduce": lambda w=whole: dist.all_reduce(w),
            "all-to-all": lambda w=whole, o=other: dist.all_to_all_single(o, w),
            "ring": lambda w=whole, o=other: ring(w, o, rank, size),
        }
        for kind, call in kinds.items():
            rows.append({"kind": kind, "bytes": total, "ranks": size, "s": timed(call)})
    if rank == 0:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        found = {"card": torch.cuda.get_device_name(), "nccl": version, "rows": rows}
        (out / "links.json").write_text(json.dumps(found, indent=1))
        for row in rows:
            if row["bytes"] == SIZES[-2]:
                print(f"{row['kind']:<15} {row['bytes'] / row['s'] / 1e9:7.1f} GB/s", flush=True)
    dist.destroy_process_group()


def ring(source: Any, target: Any, rank: int, size: int) -> None:
    """Each rank sends to the next, as context and pipeline parallel do."""
    import torch.distributed as dist

    operations = [
        dist.P2POp(dist.isend, source, (rank + 1) % size),
        dist.P2POp(dist.irecv, target, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def timed(call: Any) -> float:
    import torch

    for _ in range(5):
        call()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(REPEATS):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000 / REPEATS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Links and parallel layouts of one node.")
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--links", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.links:
        links(given.out)
        sys.exit(0)
    sys.exit(main(given.out.resolve(), given.names, given.seconds))
