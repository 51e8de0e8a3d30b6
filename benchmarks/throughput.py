"""launch/train.py against a bare Megatron-Core step on one GPU, in one call.

    python benchmarks/throughput.py OUT [CASE ...]

Runs every case (all without CASE) through launch/train.py with real text and its data loader, then
benchmarks/bare_step.py on the same plans, and writes OUT/throughput.json and a table. A case may
carry settings of its own: `1b-bf16-mbs1-none+training.check_nan=false`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    rows = []
    print(HEAD, flush=True)
    for name in names or every:
        case, *settings = name.split("+")
        run_dir = out / name.replace("=", "-")  # Hydra would split at it
        run_dir.mkdir(parents=True)
        # It imports while the run does, and measures when the GPU is free.
        bare = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "bare_step.py"), str(run_dir)],
            stdin=subprocess.PIPE, text=True,
        )  # fmt: skip
        command = [
            *(sys.executable, str(ROOT / "launch" / "train.py"), *every[case], *settings),
            *("data=library_text", f"training.train_steps={STEPS}", "training.eval_interval=0"),
            *("training.optimizer.warmup_steps=4", "checkpoint.save=false"),
            f"run_dir={run_dir}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-1500:], done.stderr[-1500:], flush=True)
        bare.communicate("go\n")
        rows.append(row(run_dir))
        (out / "throughput.json").write_text(json.dumps(rows, indent=1))
        print(line(rows[-1]), flush=True)
    return 0


HEAD = f"{'case':<28}  tok/s  bare tok/s  ratio  GiB  bare GiB  loss"


def line(r: dict[str, Any]) -> str:
    return (
        f"{r['case']:<28} {r['tokens_per_s'] or 0:7.0f} {r['bare_tokens_per_s'] or 0:7.0f} "
        f"{r['ratio'] or 0:6.3f} {r['gib'] or 0:6.1f} {r['bare_gib'] or 0:6.1f}  "
        f"{r['first_loss']} -> {r['last_loss']} {r['error'] or ''}"
    )


def row(run_dir: Path) -> dict[str, Any]:
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


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
