"""Several prepared runs one after the other under one torchrun: `many_runs.py N:RUN_DIR ...`.

A run of N processes takes the first N ranks. Every rank imports Megatron once and forks a fresh
process per run, which is training.worker's own main with a rendezvous of its own: what runs is what
a launch runs, without 15 s of imports each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from training import cpu_standin

cpu_standin.install()
# What a run imports along the way, once for all forks.
import matplotlib.pyplot  # noqa: F401
import megatron.core.tokenizers.text
import megatron.training  # noqa: F401
import torch._dynamo  # noqa: F401

from training import worker


def main(runs: list[tuple[int, Path]]) -> int:
    port, rank = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each run has its own store
    status = 0
    for index, (processes, run_dir) in enumerate(runs, start=1):
        if rank >= processes:
            continue
        child = os.fork()
        if child == 0:
            os.environ |= {"MASTER_PORT": str(port + index), "WORLD_SIZE": str(processes)}
            os._exit(worker.main(run_dir))
        _, waited = os.waitpid(child, 0)
        status = max(status, os.waitstatus_to_exitcode(waited) and 1)
    return status


if __name__ == "__main__":
    split = [argument.partition(":") for argument in sys.argv[1:]]
    sys.exit(main([(int(processes), Path(run_dir)) for processes, _, run_dir in split]))
