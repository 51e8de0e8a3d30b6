"""The planner's step times against measured and published ones.

    python benchmarks/throughput_model.py > benchmarks/throughput_model.md

Cases of benchmarks/h200: cases.jsonl (one H200, through Megatron's own train_step) and
parallel.jsonl (several of one node, through launch/train.py); and of benchmarks/published.json (a
vendor's tables). A row marked `fit` was used to calibrate.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from planning import throughput
from planning.pattern import blocks
from planning.rules import Facts
from planning.schema import RunConfig

HERE = Path(__file__).parent
Choose = Callable[[Sequence[str]], RunConfig]


@dataclass(frozen=True)
class Row:
    name: str
    fit: bool
    measured_s: float
    predicted: throughput.Estimate

    @property
    def error(self) -> float:
        """Of the predicted step time, relative: above 0 is too slow."""
        return self.predicted.step_s / self.measured_s - 1


def predict(config: RunConfig) -> throughput.Estimate | None:
    model_blocks = blocks(config.model.pattern, config.model.num_layers)
    return throughput.estimate(config, Facts(config, config.layout, model_blocks))


def measured(choose: Choose) -> list[Row]:
    """The cases that ran on the H200, without those that ran too few steps
    and those that the planner does not estimate (FP32)."""
    files = (HERE / "h200" / name for name in ("cases.jsonl", "parallel.jsonl"))
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    found = []
    for case in map(json.loads, lines):
        predicted = predict(choose(case["overrides"])) if case.get("timed") else None
        if predicted is not None:
            found.append(Row(case["name"], case["fit"], case["step_s"], predicted))
    return found


def published(choose: Choose, gpu: str | None = None) -> list[Row]:
    """gpu: only this card's."""
    found = []
    for row in json.loads((HERE / "published.json").read_text()):
        config = choose([*row["choice"].split(), "data=mock"])
        if gpu not in (None, config.hardware.gpu):
            continue
        predicted = predict(config)
        assert predicted is not None, row["name"]
        tokens = config.training.global_batch_size * config.model.seq_length
        gpus = (config.hardware.gpus_per_node or 1) * config.hardware.nodes
        step_s = row.get("step_s") or tokens / gpus / row["tokens_per_s_per_gpu"]
        found.append(Row(row["name"], row["fit"], step_s, predicted))
    return found


def summary(rows: Iterable[Row]) -> str:
    errors = sorted(abs(row.error) for row in rows)
    return (
        f"{len(errors)} rows: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}"
    )


def table(rows: Iterable[Row]) -> list[str]:
    lines = ["| case | fit | measured s | predicted s | error | largest parts of the prediction |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        parts = sorted(row.predicted.parts.items(), key=lambda part: -part[1])[:4]
        share = ", ".join(f"{name} {s / row.predicted.step_s:.0%}" for name, s in parts)
        lines.append(
            f"| {row.name} | {'fit' if row.fit else ''} | {row.measured_s:.4f} | "
            f"{row.predicted.step_s:.4f} | {row.error:+.1%} | {share} |"
        )
    return lines


def main() -> int:
    from launch import compose

    ours, theirs = measured(compose.choose), published(compose.choose)
    unseen = [row for row in ours if not row.fit]
    print("# Step times: predicted against measured\n")
    print("`python benchmarks/throughput_model.py` writes this page; planning/throughput.py is the")
    print("model, benchmarks/fit.py its calibration.\n")
    print("## One H200\n")
    print(f"All: {summary(ours)}. Not used for calibration: {summary(unseen)}.\n")
    print("\n".join(table(ours)))
    print("\n## Published (benchmarks/published.json)\n")
    print(f"All: {summary(theirs)}. Not used: {summary(r for r in theirs if not r.fit)}.\n")
    print("\n".join(table(theirs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
