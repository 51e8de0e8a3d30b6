"""What layouts must do on the GPUs of one node: learn the same, save, go on elsewhere, and stop.

    python benchmarks/layouts.py OUT [--gpus 8] [--seconds 560] [--rehearse] [PART ...]

Parts, in the order of their worth (all without PART): `parity` (losses of each layout against one
GPU), `stops` (SIGTERM, and a worker that dies), `checkpoints` (saved under one layout, continued
under another: seconds and losses), `links` (the node's preflight with its all-reduce). Each run is
launch/train.py; OUT/layouts.jsonl has a line for each, OUT/layouts.md the table. After --seconds no
new run starts. --rehearse: a tiny model on this machine's CPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
STEPS = 6
# 4 of 32 blocks: one GPU holds them, and a checkpoint is 27 GB.
MODEL = "model=llama3_8b model.num_layers=4 training.global_batch_size=16"
SMALL = (
    "model=gpt_tiny model.num_layers=8 model.hidden_size=64 model.ffn_hidden_size=128 "
    "model.num_attention_heads=8 model.num_query_groups=8 model.seq_length=64 hardware=cpu "
    "training.global_batch_size=16"
)
COMMON = (
    "training.micro_batch_size=1 training.eval_interval=0 training.optimizer.warmup_steps=1 "
    "training.optimizer.decay_steps=100 logging.tensorboard=false data=library_text"
)
PRECISIONS = ("bf16", "fp8", "fp8_delayed")
# Megatron's first weights depend on TP, PP and CP; these start from those of one GPU.
FROM_WEIGHTS = ("tp2", "tp4", "tp8", "tp2_pp4", "cp2")
FROM_SEED = {
    "ddp": "",
    "fsdp": "",
    "fsdp2": "precision.gradients=bf16",  # it sums in the type of the parameters
}
# Losses of one step that may differ: summed in another order, and rounded to BF16 or FP8 between.
TOLERANCE = {"bf16": 0.01, "fp8": 0.03, "fp8_delayed": 0.03}
TERM_S = 120  # from SIGTERM to the end, as SageMaker gives


@dataclass(frozen=True)
class Node:
    out: Path
    gpus: int
    rehearse: bool
    until: float

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until

    def command(self, name: str, *words: str, gpus: int | None = None) -> list[str]:
        model = SMALL if self.rehearse else MODEL
        return [
            *(sys.executable, str(ROOT / "launch/train.py"), *model.split(), *COMMON.split()),
            *(f"hardware.gpus_per_node={gpus or self.gpus}", f"run_dir={self.out / 'runs' / name}"),
            *(word for setting in words for word in setting.split()),
        ]

    def run(self, name: str, *words: str, gpus: int | None = None) -> dict[str, Any]:
        """A run to its end: {"seconds", "status"} and what it left in its folder."""
        folder, began = self.out / "runs" / name, time.monotonic()
        done = subprocess.run(self.command(name, *words, gpus=gpus), capture_output=True, text=True)
        seconds = time.monotonic() - began
        found = {"status": done.returncode, "seconds": round(seconds, 1)} | left_by(folder)
        if done.returncode:
            found["said"] = (done.stdout + done.stderr)[-600:]
        return found

    def holds(self, layout: str) -> bool:
        """Whether it has the GPUs that the layout splits a model over."""
        chosen = yaml.safe_load((ROOT / "conf/layout" / f"{layout}.yaml").read_text())
        split = ("tensor_parallel", "pipeline_parallel", "context_parallel")
        if self.rehearse and chosen["context_parallel"] != 1:  # a CPU has no such attention
            return False
        return math.prod(chosen[name] or 1 for name in split) <= self.gpus

    @property
    def precisions(self) -> tuple[str, ...]:
        return ("bf16",) if self.rehearse else PRECISIONS


def left_by(folder: Path) -> dict[str, Any]:
    """Losses by step, the median rate, peaks by rank, and how long saves took."""
    metrics = [line for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    result = json.loads(read(folder / "result.json") or "{}")
    saves = [
        line["seconds"]
        for line in read_lines(folder / "logs" / "events.jsonl")
        if line["event"] == "checkpoint"
    ]
    return {
        "losses": {line["step"]: line["loss"] for line in metrics},
        "tokens_per_s_per_gpu": result.get("median_tokens_per_s_per_gpu"),
        "peak_gib": result.get("peak_memory_gib_per_rank"),
        "save_s": saves,
    }


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read(path).splitlines()]


def furthest(found: dict[str, Any], reference: dict[str, Any]) -> float | None:
    """The largest difference of a step's loss; None: they have no step in common."""
    one, other = found["losses"], reference["losses"]
    return max((abs(one[step] - other[step]) for step in one if step in other), default=None)


# ------------------------------------------------------------------ parts


def parity(node: Node) -> Iterator[dict[str, Any]]:
    steps = f"training.train_steps={STEPS} checkpoint.save=false"
    untied = "model.tied_embeddings=false"  # which FSDP2 asks for
    weights = node.out / "runs" / "weights" / "checkpoints"
    for precision in node.precisions:
        form = f"precision={precision} {untied}"
        alone = node.run(f"one-{precision}", steps, form, "layout=ddp", gpus=1)
        yield {"name": f"one GPU, {precision}", **alone}
        for layout, own in FROM_SEED.items():
            if node.over:
                return
            found = node.run(f"{layout}-{precision}", steps, form, f"layout={layout}", own)
            yield compared(f"{layout}, {precision}", found, alone, TOLERANCE[precision])
        if not weights.exists():
            made = node.run("weights", "training.train_steps=1", form, "layout=ddp", gpus=1)
            yield {"name": "weights to start from", **made}
        load = f"checkpoint.load={weights}"
        alone = node.run(f"from-{precision}", steps, form, load, "layout=ddp", gpus=1)
        yield {"name": f"one GPU from weights, {precision}", **alone}
        for layout in filter(node.holds, FROM_WEIGHTS):
            if node.over:
                return
            found = node.run(f"{layout}-{precision}", steps, form, load, f"layout={layout}")
            yield compared(f"{layout}, {precision}", found, alone, TOLERANCE[precision])


def compared(
    name: str, found: dict[str, Any], reference: dict[str, Any], tolerance: float
) -> dict[str, Any]:
    apart = furthest(found, reference)
    same = found["status"] == 0 and apart is not None and apart <= tolerance
    return {"name": name, "ok": same, "apart": apart, "tolerance": tolerance, **found}


def stops(node: Node) -> Iterator[dict[str, Any]]:
    long = "training.train_steps=100000 checkpoint.interval=50000"
    for name, kind in (("term", signal.SIGTERM), ("kill", signal.SIGKILL)):
        if node.over:
            return
        folder = node.out / "runs" / name
        launcher = subprocess.Popen(
            node.command(name, long, "precision=bf16", "layout=ddp"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        while launcher.poll() is None and len(read_lines(folder / "metrics.jsonl")) < 3:
            time.sleep(0.5)
        workers = workers_of(folder)
        began = time.monotonic()
        if name == "term":
            launcher.send_signal(kind)
        elif workers:
            subprocess.run(["kill", f"-{int(kind)}", str(workers[-1])], check=False)
        said, _ = launcher.communicate(timeout=2 * TERM_S)
        seconds, left = time.monotonic() - began, workers_of(folder)
        saved = sorted((folder / "checkpoints").glob("iter_*"))
        expected = 143 if name == "term" else 1
        yield {
            "name": {"term": "SIGTERM to the launcher", "kill": "SIGKILL to one worker"}[name],
            "ok": launcher.returncode == expected and not left and seconds < TERM_S
            and (name == "kill" or bool(saved)),
            "status": launcher.returncode,
            "seconds": round(seconds, 1),
            "workers_left": len(left),
            "saved": [path.name for path in saved],
            "said": said[-400:],
            **left_by(folder),
        }  # fmt: skip


def workers_of(folder: Path) -> list[int]:
    """Processes of this run's workers."""
    found = subprocess.run(["pgrep", "-f", f"training.worker.*{folder}"],
                           capture_output=True, text=True)  # fmt: skip
    return [int(word) for word in found.stdout.split()]


def checkpoints(node: Node) -> Iterator[dict[str, Any]]:
    """Each run of 3 steps saves; the next in its folder goes on to 6 under another layout."""
    ways = [
        ("tp8", "tp4"), ("tp8", "tp2_pp4"), ("tp8", "ddp"), ("fsdp", "fsdp"), ("tp8", "fsdp"),
        *([("tp2", "ddp"), ("tp2", "pp2")] if not node.holds("tp8") else []),
    ]  # fmt: skip
    form = "precision=bf16 checkpoint.interval=1000"
    for before, after in ways:
        if node.over:
            return
        if node.rehearse and before == "fsdp":  # it saves on GPUs only
            continue
        if not (node.holds(before) and node.holds(after)):
            continue
        name = f"{before}-to-{after}"
        fewer = node.gpus // 2 if before == after else node.gpus
        first = node.run(name, form, "training.train_steps=3", f"layout={before}")
        yield {"name": f"{before}, saved", **first}
        again = node.run(name, form, "training.train_steps=6", f"layout={after}", gpus=fewer)
        refused = after == "fsdp" != before
        yield {
            "name": f"{before} to {after} on {fewer}",
            "ok": again["status"] == 2 if refused else set(again["losses"]) >= {4, 5, 6},
            **again,
        }
        subprocess.run(["rm", "-rf", str(node.out / "runs" / name)], check=True)  # 27 GB


def links(node: Node) -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "container/preflight.py"), "--gpus", str(node.gpus)]
    done = subprocess.run(command, capture_output=True, text=True)
    yield {
        "name": "preflight",
        "ok": done.returncode == 0,
        "status": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "said": (done.stdout + done.stderr)[-3000:],
    }


PARTS = {"parity": parity, "stops": stops, "checkpoints": checkpoints, "links": links}


def main(out: Path, gpus: int, seconds: float, rehearse: bool, names: list[str]) -> int:
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    node, rows = Node(out, gpus, rehearse, began + seconds), []
    with (out / "layouts.jsonl").open("a") as lines:
        for name in names or PARTS:
            for row in PARTS[name](node) if not node.over else ():
                rows.append({"part": name, **row})
                lines.write(json.dumps(rows[-1]) + "\n")
                lines.flush()
                print(f"{time.monotonic() - began:4.0f} s  {line(rows[-1])}", flush=True)
    (out / "layouts.md").write_text("\n".join(table(rows)) + "\n")
    return 1 if any(row.get("ok") is False for row in rows) else 0


def line(row: dict[str, Any]) -> str:
    words = {True: "ok", False: "FAILED", None: "done"}[row.get("ok")]
    apart = f", losses within {row['apart']:.5f}" if row.get("apart") is not None else ""
    return f"{words:<7} {row['name']}: exit {row['status']} after {row['seconds']} s{apart}"


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| part | run | | exit | s | losses apart | tokens/s a GPU | peak GiB by rank | save, s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        ok = {True: "ok", False: "**failed**", None: ""}[row.get("ok")]
        apart = f"{row['apart']:.5f}" if row.get("apart") is not None else ""
        rate = f"{row['tokens_per_s_per_gpu']:,.0f}" if row.get("tokens_per_s_per_gpu") else ""
        peaks = row.get("peak_gib") or []
        peak = f"{min(peaks):.1f} to {max(peaks):.1f}" if peaks else ""
        saves = ", ".join(f"{seconds:.1f}" for seconds in row.get("save_s", []))
        yield (
            f"| {row['part']} | {row['name']} | {ok} | {row['status']} | {row['seconds']} | "
            f"{apart} | {rate} | {peak} | {saves} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Layouts on the GPUs of one node.")
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.out.resolve(), given.gpus, given.seconds, given.rehearse, given.parts))
