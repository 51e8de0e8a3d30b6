"""Links and parallel layouts on the GPUs of one node.

    python benchmarks/parallel.py OUT [--seconds 400] [NAME ...]

First NCCL's collectives by size (OUT/links.json), then steps of launch/train.py under each kind of
parallelism (OUT/parallel.jsonl; all cases without NAME), with rate and peaks beside the plan's.
Random tokens; medians without the first steps. After --seconds no new case starts.
benchmarks/throughput_model.py compares; what layouts must do besides is in benchmarks/layouts.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = [2**n for n in range(18, 32)]  # bytes: 256 KiB to 2 GiB
REPEATS = 20
EIGHT_B = "model=llama3_8b training.global_batch_size=128"
THIRTY_TWO_B = "model=gpt_32b training.global_batch_size=128"
COMMON = "data=mock checkpoint.save=false training.eval_interval=0 logging.tensorboard=false"
FSDP2 = "precision.gradients=bf16 model.tied_embeddings=false"


@dataclass(frozen=True)
class Case:
    """Settings of launch/train.py, the steps to train, and those of them that are not counted."""

    words: str
    steps: int = 6
    warm_up: int = 2


# Most wanted first: a lease may end before the last.
CASES = {
    "8b-ddp-fp8": Case(f"{EIGHT_B} precision=fp8 layout=ddp"),
    "8b-ddp": Case(f"{EIGHT_B} precision=bf16 layout=ddp"),
    "8b-tp2": Case(f"{EIGHT_B} precision=bf16 layout=tp2"),
    "8b-fsdp": Case(f"{EIGHT_B} precision=bf16 layout=fsdp"),
    "8b-tp2_pp4": Case(f"{EIGHT_B} precision=bf16 layout=tp2_pp4"),
    "8b-cp2": Case(f"{EIGHT_B} precision=bf16 layout=cp2"),
    "8b-tp8-fp8": Case(f"{EIGHT_B} precision=fp8 layout=tp8"),
    "32b-tp8-fp8": Case(f"{THIRTY_TWO_B} precision=fp8 layout=tp8", 3, 1),
    "32b-fsdp": Case(f"{THIRTY_TWO_B} precision=bf16 layout=fsdp layout.recompute=full", 3, 1),
    "8b-ddp-fp8_delayed": Case(f"{EIGHT_B} precision=fp8_delayed layout=ddp"),
    "8b-fsdp-fp8": Case(f"{EIGHT_B} precision=fp8 layout=fsdp"),
    "8b-fsdp2": Case(f"{EIGHT_B} precision=bf16 layout=fsdp2 {FSDP2}"),
    "8b-tp4": Case(f"{EIGHT_B} precision=bf16 layout=tp4"),
    "8b-tp8": Case(f"{EIGHT_B} precision=bf16 layout=tp8"),
    **{
        f"8b-{layout}-{precision}": Case(f"{EIGHT_B} precision={precision} layout={layout} {own}")
        for precision in ("fp8", "fp8_delayed")
        for layout, own in {
            "tp2": "", "tp4": "", "tp2_pp4": "", "cp2": "", "fsdp2": FSDP2,
        }.items()
    },
    "8b-fsdp-fp8_delayed": Case(f"{EIGHT_B} precision=fp8_delayed layout=fsdp"),
    "8b-tp8-fp8_delayed": Case(f"{EIGHT_B} precision=fp8_delayed layout=tp8"),
    "32b-tp2_pp4-fp8": Case(f"{THIRTY_TWO_B} precision=fp8 layout=tp2_pp4", 3, 1),
    "ep4": Case("model=moe_8x1b model.num_layers=4 training.global_batch_size=16 precision=bf16 "
                "layout=ep8 layout.expert_parallel=4", 14, 4),
    "ddp-open": Case("model=llama3_8b model.num_layers=8 precision=bf16 layout=ddp "
                     "layout.overlap=false training.global_batch_size=8", 14, 4),
}  # fmt: skip


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
            print(f"{name:<20} {line(record)} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def line(record: dict[str, Any]) -> str:
    if "error" in record:
        return str(record["error"])
    return (
        f"{record['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU "
        f"({record['predicted_tokens_per_s_per_gpu'] or 0:,.0f} predicted), MFU "
        f"{record['mfu']:.1%}, peak {max(record['peak_gib']):.1f} GiB "
        f"({record['predicted_peak_gib'] or 0:.1f})"
    )


def torchrun(gpus: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(gpus)]  # fmt: skip


def measure(name: str, gpus: int, run_dir: Path) -> dict[str, Any]:
    case = CASES[name]
    words = [*case.words.split(), *COMMON.split(), f"training.train_steps={case.steps}"]
    command = [sys.executable, str(ROOT / "launch/train.py"), *words, f"run_dir={run_dir}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    record: dict[str, Any] = {
        "name": f"{gpus} x H200, {name}",
        "overrides": [*words, "hardware=h200", f"hardware.gpus_per_node={gpus}"],
        "fit": False,
    }
    metrics = run_dir / "metrics.jsonl"
    lines = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else []
    steps = [line for line in lines if "step_s" in line and line["step"] > case.warm_up]
    if done.returncode or not steps:
        return record | {"error": (done.stderr + done.stdout)[-500:]}
    times = [line["step_s"] for line in steps]
    result = json.loads((run_dir / "result.json").read_text())
    predicted = json.loads((run_dir / "plan.json").read_text())
    return record | {
        "timed": True,
        "step_s": statistics.median(times),
        "times": times,
        "tokens_per_s_per_gpu": statistics.median(s["tokens_per_s_per_gpu"] for s in steps),
        "mfu": statistics.median(s["mfu"] for s in steps),
        "peak_gib": result["peak_memory_gib_per_rank"],
        "predicted_tokens_per_s_per_gpu": predicted["throughput"].get("tokens_per_s_per_gpu"),
        "predicted_peak_gib": predicted["memory"]["peak_gib"],
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
