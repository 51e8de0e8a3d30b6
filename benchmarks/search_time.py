"""How long layout=auto searches, on one core of the machine at hand.

    python benchmarks/search_time.py

CPU seconds, the best of three, of the search alone in a process that has imported everything.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch import compose
from planning import search
from planning.pattern import blocks
from planning.report import table

CASES = (
    ("model=gpt_1b",),
    ("model=gpt_8b", "precision=fp8"),
    ("model=gpt_32b", "precision=nvfp4"),
    ("model=gpt_64b", "precision=mxfp8", "model.seq_length=32768"),
    ("model=moe_8x1b",),
    ("model=llama3_70b", "precision=fp8", "hardware.nodes=8"),
    ("model=gpt_64b", "hardware.nodes=64", "training.global_batch_size=2048"),
    ("model=gpt_64b", "hardware.nodes=64", "training.global_batch_size=2048",
     "model.seq_length=32768"),
    ("model=llama31_405b", "precision=mxfp8", "hardware.nodes=64"),
)  # fmt: skip


def main() -> int:
    rows = [["choice", "splits that fit", "estimates", "CPU s"]]
    for words in CASES:
        config = compose.choose(["hardware=p6_b200", *words])
        model_blocks = blocks(config.model.pattern, config.model.num_layers)
        times = []
        for _ in range(3):
            began = time.process_time()
            found = search.run(config, model_blocks)
            times.append(time.process_time() - began)
        assert found is not None
        rows.append([" ".join(words), str(len(found.best)), str(found.tried), f"{min(times):.2f}"])
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
