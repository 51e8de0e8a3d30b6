"""CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from planning.rules.base import Facts, Verdict, rule


@rule("cuda-graph", "full_cuda_graph.py captures forward and backward: no host may decide in them")
def cuda_graph(f: Facts) -> Iterator[Verdict]:
    if f.layout.cuda_graph != "full":
        return
    refused = [
        (f.gpu.is_cpu, "hardware", "a CPU has no CUDA graphs"),
        (
            "E" in f.config.model.pattern,
            "model.pattern",
            "experts (E) read the number of their tokens back to the host in every step",
        ),
        (
            f.config.precision.dtype == "fp16",
            "precision.dtype",
            "FP16's loss scale changes from step to step and a graph keeps the first one",
        ),
        (
            f.layout.sharding in ("fsdp", "fsdp2"),
            "layout.sharding",
            f"a graph of {f.layout.sharding}'s gathers has not been shown to compute the same",
        ),
    ]
    for wrong, because, message in refused:
        if wrong:
            yield "layout.cuda_graph", f"full with {because}: {message}", "take cuda_graph=none"
