"""Megatron's own loop on a CPU: it learns, resumes to the bit, and multiplies BF16 as it should.

Six steps of a tiny model with dropout, in real processes over gloo (tiny_pretrain.py). A run that
is loaded from the checkpoint of step 3 has to continue with the very losses of the run that went
on, which needs the optimizer's state, its step, the random numbers, the schedule and the data.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from training import cpu_standin

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED = 6, 3
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"

# name -> (ranks of torchrun that are its world, Megatron's arguments); those of one rank run side
# by side.
CASES: dict[str, tuple[list[int], list[str]]] = {
    "plain": ([0], []),
    "bf16": ([1], ["--bf16", "--use-distributed-optimizer", RESHARDABLE]),
    "sgd": ([0], ["--optimizer", "sgd"]),
    # Its loss scale starts at 2^32, so all 6 steps are skipped: no optimizer state exists to save.
    "fp16": ([1], ["--fp16"]),
    "ddp": (
        [0, 1],
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    ),
    "fsdp2": ([0, 1], ["--use-torch-fsdp2", "--untie-embeddings-and-output-weights"]),
}
ONE_RANK, TWO_RANKS = (
    [name for name, (ranks, _) in CASES.items() if len(ranks) == n] for n in (1, 2)
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each run found: NAME, and NAME_resumed from the checkpoint of NAME."""
    folder = tmp_path_factory.mktemp("cpu_standin")
    first, second = [], []
    for name, (ranks, arguments) in CASES.items():
        save = ["--save", str(folder / name), "--save-interval", str(SAVED)]
        load = ["--load", str(folder / name), "--ckpt-step", str(SAVED)]
        first.append({"name": name, "ranks": ranks, "arguments": [*arguments, *save]})
        second.append({"name": f"{name}_resumed", "ranks": ranks, "arguments": [*arguments, *load]})
    runs = folder / "runs.json"
    runs.write_text(json.dumps(first + second))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "training" / "tiny_pretrain.py"), str(runs)],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", cpu_standin.HALF_GEMM: "emulate"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {
        run["name"]: [
            json.loads((folder / f"{run['name']}-{rank}.json").read_text())
            for rank in range(len(run["ranks"]))
        ]
        for run in first + second
    }


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_continues_to_the_bit(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    for whole, resumed in zip(results[name], results[f"{name}_resumed"], strict=True):
        losses = whole["losses"]
        assert len(losses) * len(results[name]) == 2 * STEPS  # two micro batches a step in all
        assert resumed["losses"] == losses[len(losses) * SAVED // STEPS :]


@pytest.mark.parametrize("name", ["plain", "bf16", "ddp", "fsdp2"])
def test_the_loss_falls(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank in results[name]:
        assert rank["losses"][-1] < rank["losses"][0] - 0.2


def test_bf16_follows_fp32(results: dict[str, list[dict[str, Any]]]) -> None:
    # The same weights, data and dropout. BF16 rounds at 2^-9 relative, which averages out over
    # a batch; products in the wrong order or precision would not.
    fp32, bf16 = results["plain"][0]["losses"], results["bf16"][0]["losses"]
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, abs=2e-3)


def test_fp16_starts_by_lowering_its_scale(results: dict[str, list[dict[str, Any]]]) -> None:
    # No update so far: the losses of one batch after the other, with the initial weights.
    assert min(results["fp16"][0]["losses"]) > results["plain"][0]["losses"][-1] + 0.2


def test_ranks_of_data_parallelism_differ_in_data(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    zero, one = results["ddp"]
    assert zero["losses"][0] != one["losses"][0]
    # The first micro batch of rank 0 is the first of a single process: same weights, same dropout.
    assert zero["losses"][0] == results["plain"][0]["losses"][0]


def test_products_of_half_precision_are_fp32_rounded(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for name, ranks in results.items():
        for found in ranks:
            wrong = [gemm for gemm, same in found["gemms"].items() if not same]
            assert not wrong, name
            assert len(found["gemms"]) == 1 + 2 * 10


@pytest.mark.parametrize("name", [*ONE_RANK, *TWO_RANKS])
def test_the_cpu_answers_for_the_gpu(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    world = len(CASES[name][0])
    for rank, found in enumerate(results[name]):
        assert found["average"] == (1 if world == 1 else 1.5)
        assert found["shard_of_halves"] == 0.5 * world * (rank + 1)
        assert found["halves"] == [float(i + 1) for i in range(world)]  # the input stays
        assert found["devices"] == ["cpu"] * 4
        assert found["available"] is False
        assert found["type"] == "torch.FloatTensor"
        assert (
            2e8 < found["peak_bytes"] < 2e10
        )  # of the process: Megatron's modules alone are 0.5 GB


@pytest.mark.skipif(torch.cuda.is_available(), reason="only acts without a GPU")
def test_it_comes_before_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_standin, "_installed", False)
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    synchronize = torch.cuda.synchronize
    with pytest.raises(RuntimeError, match=r"must come before the import of megatron\.core"):
        cpu_standin.install()
    assert torch.cuda.synchronize is synchronize


def test_emulation_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, emulated in (("emulate", True), ("native", False)):
        monkeypatch.setenv(cpu_standin.HALF_GEMM, choice)
        assert cpu_standin.emulates_half_gemms() is emulated
        assert cpu_standin.emulates_half_gemms(torch.float16) is emulated
    monkeypatch.setenv(cpu_standin.HALF_GEMM, "emulated")
    with pytest.raises(ValueError, match="SLIPWAY_HALF_GEMM=emulated: take 'emulate' or 'native'"):
        cpu_standin.emulates_half_gemms()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 instruction set")
def test_a_cpu_with_avx2_alone_emulates() -> None:
    code = "from training.cpu_standin import emulates_half_gemms as e; print(e())"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    environment.pop(cpu_standin.HALF_GEMM, None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "True", done.stderr
