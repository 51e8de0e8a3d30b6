"""Prepare and run real plans in tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from launch import compose, machine
from planning.findings import refuse
from planning.resolve import resolve
from planning.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"  # library_text is made once for all tests

# Small and quick: 4 blocks of 64, FP32, so that layouts differ by rounding only.
TINY = (
    "model=gpt_tiny model.num_layers=4 model.hidden_size=64 model.ffn_hidden_size=128 "
    "model.seq_length=64 precision=fp32 hardware=cpu training.micro_batch_size=2 "
    "training.global_batch_size=8 training.train_steps=20 training.eval_interval=0 "
    "training.optimizer.learning_rate=1e-3 checkpoint.save=false logging.tensorboard=false"
).split()


def config(*overrides: str) -> RunConfig:
    """What `launch/train.py OVERRIDES` would choose, with this machine for hardware=this."""
    with initialize_config_dir(str(compose.CONF), version_base="1.3"):
        chosen = compose.validate(hydra_compose("config", overrides=list(overrides)))
    hardware = machine.fill(chosen.hardware, machine.look())
    return chosen.model_copy(update={"hardware": hardware})


def prepare(run_dir: Path, *overrides: str) -> Path:
    """Write the plan of `overrides` into `run_dir`, ready for a worker."""
    resolution = resolve(config(*overrides))
    refuse(resolution.findings)
    assert resolution.plan is not None
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "plan.yaml").write_text(resolution.plan.to_yaml())
    roots = {"run:": str(run_dir), "cache:": str(CACHE)}
    (run_dir / "logs" / "environment.json").write_text(json.dumps({"roots": roots}))
    return run_dir


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row, below those that outgoing connections take."""
    while True:
        first = random.randrange(10_000, 30_000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def torchrun(runs: Sequence[tuple[int, Path]], timeout_s: float = 900) -> None:
    """Run prepared plans, (processes, folder) each, one after the other under one torchrun."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = max(processes for processes, _ in runs)
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"),
        *("--master-port", str(free_ports(len(runs) + 1))),
        str(ROOT / "tests" / "training" / "many_runs.py"),
        *(f"{processes}:{run_dir}" for processes, run_dir in runs),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    for _, run_dir in runs:
        errors = sorted((run_dir / "logs").glob("error-rank-*.json"))
        assert not errors, json.loads(errors[0].read_text())["traceback"]
        assert (run_dir / "result.json").exists(), done.stderr[-3000:]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(run_dir: Path) -> list[float]:
    """Training losses by step."""
    return [line["loss"] for line in lines(run_dir) if "loss" in line]
