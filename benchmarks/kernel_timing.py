"""How benchmarks/kernels.py takes the time of a call on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Row = dict[str, Any]
LIMIT_S = 140.0  # no section starts a new row after it
CACHE_BYTES = 2e8  # buffers are rotated until they exceed it: four times the L2 cache of an H200
REPLAY_S, REPLAYS = 0.008, 3
BEGAN = time.monotonic()
BF16 = torch.bfloat16


def out_of_time() -> bool:
    return time.monotonic() - BEGAN > LIMIT_S


def timed(call: Callable[[int], object], copies: int = 1) -> Row:
    """{"s": seconds of call(i), "eager": ...}; `i` counts 0..copies-1, one set of buffers each."""
    call(0)
    torch.cuda.synchronize()
    once = events(lambda: call(0))
    repeats = max(1, min(64, int(REPLAY_S / max(once, 1e-6))))
    # A short call's eager time is the launch's: capture more of it.
    repeats = max(repeats, copies) if once < REPLAY_S else repeats

    def batch() -> None:
        for i in range(repeats):
            call(i % copies)

    graph = capture(call, batch)
    run = graph.replay if graph else batch
    run()
    times = [events(run) / repeats for _ in range(REPLAYS)]
    return {"s": statistics.median(times), "eager": graph is None}


def capture(
    call: Callable[[int], object], batch: Callable[[], None]
) -> torch.cuda.CUDAGraph | None:
    """A graph of `batch`, warmed up by `call`; None: it cannot be captured.

    torch.cuda.graph would empty the allocator's cache first, which costs more than most rows here.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        try:
            call(0)
            torch.cuda.synchronize()
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                batch()
            finally:
                graph.capture_end()
        except Exception:
            graph = None
    torch.cuda.synchronize()
    return graph


def events(run: Callable[[], object]) -> float:
    """Seconds between two events on the stream around `run`."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


def copies_of(size: float) -> int:
    """How many sets of buffers of `size` bytes exceed the cache."""
    return max(1, min(8, int(CACHE_BYTES / size) + 1))


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda") * scale
