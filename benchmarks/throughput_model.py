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
from planning.rules import Facts
from planning.schema import RunConfig

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text())
STEPS = 6  # of a case, after those that warm up
Choose = Callable[[Sequence[str]], RunConfig]


@dataclass(frozen=True)
class Row:
    name: str
    fit: bool
    measured_s: float
    predicted: throughput.Estimate
    spread: tuple[float, float] | None = None  # fastest and slowest of the steps measured

    @property
    def error(self) -> float:
        """Of the predicted step time, relative: above 0 is too slow."""
        return self.predicted.step_s / self.measured_s - 1


def predict(config: RunConfig) -> throughput.Estimate | None:
    return throughput.estimate(config, Facts.of(config))


def measured(choose: Choose) -> list[Row]:
    """The cases that ran on the H200, without those that ran too few steps
    and those that the planner does not estimate (FP32)."""
    files = (HERE / "h200" / name for name in ("cases.jsonl", "parallel.jsonl"))
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    found = []
    for case in map(json.loads, lines):
        predicted = predict(choose(case["overrides"])) if case.get("timed") else None
        if predicted is not None:
            steps = sorted(case["times"][-STEPS:])
            spread = steps[0], steps[-1]
            found.append(Row(case["name"], case["fit"], case["step_s"], predicted, spread))
    return found


def published(choose: Choose, gpu: str | None = None) -> list[Row]:
    """gpu: only this card's."""
    found = []
    for row in PUBLISHED["rows"]:
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
    lines = ["| case | fit | measured s | steps from, to | predicted s | error | largest parts |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        parts = sorted(row.predicted.parts.items(), key=lambda part: -part[1])[:4]
        spread = f"{row.spread[0]:.3f}, {row.spread[1]:.3f}" if row.spread else ""
        share = ", ".join(f"{name} {s / row.predicted.step_s:.0%}" for name, s in parts)
        lines.append(
            f"| {row.name} | {'fit' if row.fit else ''} | {row.measured_s:.4f} | "
            f"{spread} | {row.predicted.step_s:.4f} | {row.error:+.1%} | {share} |"
        )
    return lines


HEAD = """# Step times: predicted against measured

`python benchmarks/throughput_model.py` writes this page. The model is planning/throughput.py, its
curves planning/curves.json, which `python benchmarks/fit.py` fits to benchmarks/h200/kernels.json
(kernels alone, `python benchmarks/kernels.py`) and to the rows marked `fit` here: two numbers to
those of the H200 (the rate that products and attention keep up in a whole step, and what the host
adds to a step), four to the published ones (Blackwell's shares of its BF16, FP8 and FP4 peaks, and
B200's rate beside GB200's). An error above 0 predicts too slow a step.
"""


def main() -> int:
    from launch import compose

    ours, theirs = measured(compose.choose), published(compose.choose)
    print(HEAD)
    print("## One H200\n")
    print(f"All: {summary(ours)}.")
    print(f"Not used for calibration: {summary(row for row in ours if not row.fit)}.\n")
    print("\n".join(table(ours)))
    print("\n## Published\n")
    print(f"{PUBLISHED['source']}.\n")
    print(f"All: {summary(theirs)}.")
    print(f"Not used for calibration: {summary(row for row in theirs if not row.fit)}.\n")
    print("\n".join(table(theirs)))
    print("\nNot compared:\n")
    print("\n".join(f"- {row}" for row in PUBLISHED["not_compared"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
