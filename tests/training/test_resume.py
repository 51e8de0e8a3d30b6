"""A run that was stopped goes on as if it had not been, also under another layout.

On the same layout to the bit; on another within the rounding that test_parallel.py explains.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.runs import TINY, lines, losses, prepare, torchrun
from tests.training.test_parallel import TOLERANCE

HALF, WHOLE = 10, 20
SAVING = [
    "checkpoint.save=true",
    "checkpoint.interval=5",
    f"training.optimizer.decay_steps={WHOLE}",
]

# name -> (processes that save, overrides, processes that resume, overrides)
SAME = {
    "one": (1, ["layout=ddp"], 1, ["layout=ddp"]),
    "bf16": (1, ["layout=ddp", "precision=bf16"], 1, ["layout=ddp", "precision=bf16"]),
    "replicated": (2, ["layout=replicated"], 2, ["layout=replicated"]),
    "ddp2": (2, ["layout=ddp"], 2, ["layout=ddp"]),
}
OTHER = {
    "tp2_to_one": (2, ["layout=tp2"], 1, ["layout=ddp"]),
    "tp2_to_pp2": (2, ["layout=tp2"], 2, ["layout=pp2"]),
    "tp2_to_ddp2": (2, ["layout=tp2"], 2, ["layout=ddp"]),
    "one_to_tp2_pp2": (1, ["layout=ddp"], 4, ["layout=tp2_pp2"]),
    "ddp2_to_ddp4": (2, ["layout=ddp"], 4, ["layout=ddp"]),
    "ddp4_to_ddp3": (4, ["layout=ddp"], 3, ["layout=ddp"]),
}
TO_THREE = ["training.micro_batch_size=1", "training.global_batch_size=12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FOLDER/NAME/{whole,half}: a run of 20 steps; one of 10 that another start continued to 20."""
    folder = tmp_path_factory.mktemp("resume")
    rounds: list[dict[int, list[Path]]] = [{}, {}]

    def add(turn: int, run_dir: Path, processes: int, overrides: list[str]) -> None:
        ranks = f"hardware.gpus_per_node={processes}"
        prepare(run_dir, *TINY, *SAVING, ranks, *overrides)
        rounds[turn].setdefault(processes, []).append(run_dir)

    for name, (saving, save, _, _) in (SAME | OTHER).items():
        batch = TO_THREE if name.endswith("ddp3") else []
        add(0, folder / name / "whole", saving, [*save, *batch])
        add(0, folder / name / "half", saving, [*save, *batch, f"training.train_steps={HALF}"])
    for processes, run_dirs in rounds[0].items():
        torchrun(processes, run_dirs)
    for name, (_, _, resuming, resume) in (SAME | OTHER).items():
        batch = TO_THREE if name.endswith("ddp3") else []
        half, resumed = folder / name / "half", folder / name / "resumed"
        add(1, resumed, resuming, [*resume, *batch])
        shutil.copytree(half / "checkpoints", resumed / "checkpoints")
    for processes, run_dirs in rounds[1].items():
        torchrun(processes, run_dirs)
    return folder


@pytest.mark.parametrize("name", SAME)
def test_the_same_layout_continues_to_the_bit(folder: Path, name: str) -> None:
    whole, resumed = losses(folder / name / "whole"), losses(folder / name / "resumed")
    assert losses(folder / name / "half") == whole[:HALF]
    assert [line["step"] for line in lines(folder / name / "resumed")] == list(range(11, 21))
    assert resumed == whole[HALF:]


@pytest.mark.parametrize("name", OTHER)
def test_another_layout_continues_within_rounding(folder: Path, name: str) -> None:
    whole, resumed = losses(folder / name / "whole"), losses(folder / name / "resumed")
    assert resumed == pytest.approx(whole[HALF:], abs=TOLERANCE)
    assert resumed[-1] < whole[HALF - 1]  # it went on learning


def test_the_learning_rate_and_tokens_continue(folder: Path) -> None:
    whole, resumed = lines(folder / "one" / "whole"), lines(folder / "one" / "resumed")
    for before, after in zip(whole[HALF:], resumed, strict=True):
        assert after["lr"] == before["lr"]
        assert after["tokens"] == before["tokens"] == before["step"] * 8 * 64
