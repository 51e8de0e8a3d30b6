"""The planner's peak memory against what an H200 measured.

    python benchmarks/memory_model.py > benchmarks/memory_model.md

Cases of benchmarks/h200/cases.jsonl (python benchmarks/cases.py OUT).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from planning import memory
from planning.hardware import GIB
from planning.rules import Facts
from planning.schema import RunConfig

CASES = Path(__file__).parent / "h200" / "cases.jsonl"
Choose = Callable[[Sequence[str]], RunConfig]


@dataclass(frozen=True)
class Row:
    """GiB; `peak` and `reserved` are None for a case that ran out of memory."""

    name: str
    predicted: memory.Estimate
    peak: float | None
    reserved: float | None
    capacity: float

    @property
    def error(self) -> float | None:
        """Of the predicted peak, relative: above 0 is too much."""
        return None if self.peak is None else self.predicted.peak / GIB / self.peak - 1

    @property
    def fits(self) -> bool:
        return self.predicted.needed / GIB <= self.capacity


def predict(config: RunConfig) -> memory.Estimate | None:
    return memory.estimate(Facts.of(config))


def rows(choose: Choose) -> list[Row]:
    found = []
    for case in map(json.loads, CASES.read_text().splitlines()):
        config = choose(case["overrides"])
        predicted = predict(config)
        assert predicted is not None, case["name"]
        ran = "peak" in case
        found.append(
            Row(
                case["name"],
                predicted,
                case["peak"] / GIB if ran else None,
                case["reserved"] / GIB if ran else None,
                139.8,  # GiB that CUDA gave on the card
            )
        )
    return found


HEAD = """# Peak memory: predicted against measured

`python benchmarks/memory_model.py` writes this page. The model is planning/memory.py and
planning/activations.py: tensors counted from the source of Megatron-Core 0.19.2 and Transformer
Engine 2.20, and corrected where eight of these cases differed (README.md). Nothing is fitted to a
case. Four numbers are of the card: 0.1 GiB of library workspaces and 0.06 GiB more under a CUDA
graph (in every case), 2.8 GiB outside torch and 1% that torch could not put to use (of the run that
ran out of memory). "Allocated" is torch's peak, as in
metrics.jsonl; "reserved" is what its allocator took from the card, which is more where there is
room and no limit; "needed" is what the planner asks a card to have.
"""


def main() -> int:
    from launch import compose

    found = rows(compose.choose)
    errors = [abs(row.error) for row in found if row.error is not None]
    print(HEAD)
    print(
        f"One NVIDIA H200 (139.8 GiB), driver 580.159.04, torch 2.11.0+cu130, 2026-12-01: "
        f"{len(found)} cases, median error {statistics.median(errors):.3%}, worst "
        f"{max(errors):.3%}; {sum(row.peak is None for row in found)} ran out of memory, "
        f"{sum(row.peak is None and row.fits for row in found)} of them predicted to fit; "
        f"{sum(row.peak is not None and not row.fits for row in found)} ran that were predicted "
        "not to fit.\n"
    )
    print("| case | allocated GiB | predicted | error | reserved | needed | largest parts |")
    print("|---|---|---|---|---|---|---|")
    for row in found:
        parts = sorted(row.predicted.parts.items(), key=lambda part: -part[1])[:4]
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
        measured = f"{row.peak:.2f}" if row.peak else "out of memory"
        error = f"{row.error:+.2%}" if row.error is not None else ""
        reserved = f"{row.reserved:.2f}" if row.reserved else ""
        print(
            f"| {row.name} | {measured} | {row.predicted.peak / GIB:.2f} | {error} | {reserved} | "
            f"{row.predicted.needed / GIB:.2f} | {shown} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
