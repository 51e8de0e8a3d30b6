"""launch/train.py against a bare Megatron-Core step on one GPU, in one call.

    python benchmarks/throughput.py OUT [CASE ...]

Runs every case (all without CASE) through launch/train.py with real text and its data loader, then
benchmarks/bare_step.py on the same plans, and writes OUT/throughput.json and a table.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 14
MODELS = {
    "1b": ["model=gpt_1b"],
    "8b8": ["model=llama3_8b", "model.num_layers=8"],  # 8 of 32 blocks
}


def cases() -> dict[str, list[str]]:
    found = {}
    for model, choice in MODELS.items():
        for size in (1, 2):
            for precision in ("bf16", "fp8", "fp8_delayed", "fp8_blockwise"):
                for recompute in ("none", "full"):
                    if recompute == "full" and (size == 2 or precision not in ("bf16", "fp8")):
                        continue
                    name = f"{model}-{precision}-mbs{size}-{recompute}"
                    found[name] = [
                        *choice,
                        f"precision={precision}",
                        f"training.micro_batch_size={size}",
                        f"training.global_batch_size={2 * size}",
                        f"layout.recompute={recompute}",
                    ]
    return found


def main(out: Path, names: list[str]) -> int:
    every = cases()
    began = time.time()
    for name in names or every:
        run_dir = out / name
        command = [
            *(sys.executable, str(ROOT / "launch" / "train.py"), *every[name]),
            *("data=library_text", f"training.train_steps={STEPS}", "training.eval_interval=0"),
            *("training.optimizer.warmup_steps=4", "checkpoint.save=false"),
            f"run_dir={run_dir}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        print(f"{time.time() - began:6.0f} s  {name}: status {done.returncode}", flush=True)
        if done.returncode:
            print(done.stdout[-1500:], done.stderr[-1500:], flush=True)
    run_dirs = [out / name for name in names or every if (out / name / "plan.yaml").exists()]
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "bare_step.py"), *map(str, run_dirs)])
    rows = [row(path) for path in run_dirs]
    (out / "throughput.json").write_text(json.dumps(rows, indent=1))
    print(f"{'case':<34} tok/s  bare tok/s  ratio  GiB  bare GiB  loss first -> last")
    for r in rows:
        print(
            f"{r['case']:<34} {r['tokens_per_s'] or 0:8.0f} {r['bare_tokens_per_s'] or 0:8.0f} "
            f"{r['ratio'] or 0:6.3f} {r['gib'] or 0:6.1f} {r['bare_gib'] or 0:6.1f}  "
            f"{r['first_loss']} -> {r['last_loss']} {r['error'] or ''}"
        )
    return 0


def row(run_dir: Path) -> dict[str, object]:
    """One case: medians over the steps after the first four, as the bare step's."""
    bare = read(run_dir / "bare.json")
    plan_rate = bare.get("tokens_per_s")
    steps = [
        line
        for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    ] if (run_dir / "metrics.jsonl").exists() else []  # fmt: skip
    rate = (
        statistics.median(line["tokens_per_s_per_gpu"] for line in steps[4:]) if steps[4:] else None
    )
    return {
        "case": run_dir.name,
        "tokens_per_s": rate,
        "bare_tokens_per_s": plan_rate,
        "ratio": rate / plan_rate if rate and plan_rate else None,
        "gib": read(run_dir / "result.json").get("peak_memory_gib"),
        "bare_gib": bare.get("peak_gib"),
        "first_loss": round(steps[0]["loss"], 3) if steps else None,
        "last_loss": round(steps[-1]["loss"], 3) if steps else None,
        "error": bare.get("error"),
    }


def read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
