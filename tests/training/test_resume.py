"""A run that was stopped goes on as if it had not been, also under another layout.

On the same layout to the bit; on another within the rounding that test_parallel.py explains.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.runs import TINY, lines, losses, prepare, torchrun
from tests.training.test_parallel import TOLERANCE
from training import checkpoints

HALF, WHOLE = 10, 20
SAVING = [
    "checkpoint.save=true",
    "checkpoint.interval=5",
    "checkpoint.keep=4",
    f"training.optimizer.decay_steps={WHOLE}",
]

UNTIED = "model.tied_embeddings=false"
FSDP2 = ["layout=fsdp2", UNTIED]

TO_THREE = ["training.micro_batch_size=1", "training.global_batch_size=12"]
# what is saved: name -> (processes, overrides)
SAVED = {
    "one": (1, ["layout=ddp"]),
    "bf16": (1, ["layout=ddp", "precision=bf16"]),
    "replicated": (2, ["layout=replicated"]),
    "ddp2": (2, ["layout=ddp"]),
    "tp2": (2, ["layout=tp2"]),
    "fsdp2": (2, FSDP2),
    "ddp4": (4, ["layout=ddp", *TO_THREE]),
}
# what resumes from it elsewhere: (saved, processes, overrides)
OTHER = {
    "tp2_to_one": ("tp2", 1, ["layout=ddp"]),
    "tp2_to_pp2": ("tp2", 2, ["layout=pp2"]),
    "tp2_to_ddp2": ("tp2", 2, ["layout=ddp"]),
    "one_to_tp2_pp2": ("one", 4, ["layout=tp2_pp2"]),
    "ddp4_to_ddp3": ("ddp4", 3, ["layout=ddp", *TO_THREE]),
    "fsdp2_to_replicated": ("fsdp2", 2, ["layout=replicated", UNTIED]),
}
SAME = {name: name for name in ("one", "bf16", "replicated", "ddp2", "fsdp2")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FOLDER/saved/NAME: runs of 20 steps; FOLDER/resumed/NAME: from their tenth step on."""
    folder = tmp_path_factory.mktemp("resume")

    def run(kind: str, cases: dict[str, tuple[int, list[str]]]) -> None:
        runs = []
        for name, (processes, overrides) in cases.items():
            run_dir = folder / kind / name
            ranks = f"hardware.gpus_per_node={processes}"
            prepare(run_dir, *TINY, *SAVING, ranks, *overrides)
            runs.append((processes, run_dir))
            if kind == "resumed":
                saved = OTHER[name][0] if name in OTHER else name
                shutil.copytree(
                    folder / "saved" / saved / "checkpoints",
                    run_dir / "checkpoints",
                    ignore=shutil.ignore_patterns("iter_0000015", "iter_0000020"),
                )
                # The tracker names the last step: what a stop at the tenth would have left.
                checkpoints.prepare_resume(run_dir / "checkpoints")
        torchrun(runs)

    run("saved", SAVED)
    same = {name: SAVED[name] for name in SAME}
    run("resumed", same | {name: case[1:] for name, case in OTHER.items()})
    return folder


@pytest.mark.parametrize("name", SAME)
def test_the_same_layout_continues_to_the_bit(folder: Path, name: str) -> None:
    whole, resumed = losses(folder / "saved" / name), losses(folder / "resumed" / name)
    assert [line["step"] for line in lines(folder / "resumed" / name)] == list(range(11, 21))
    assert resumed == whole[HALF:]


@pytest.mark.parametrize("name", OTHER)
def test_another_layout_continues_within_rounding(folder: Path, name: str) -> None:
    whole, resumed = losses(folder / "saved" / OTHER[name][0]), losses(folder / "resumed" / name)
    assert resumed == pytest.approx(whole[HALF:], abs=TOLERANCE)
    assert resumed[-1] < whole[HALF - 1]  # it went on learning


def test_the_learning_rate_and_tokens_continue(folder: Path) -> None:
    whole, resumed = lines(folder / "saved" / "one"), lines(folder / "resumed" / "one")
    for before, after in zip(whole[HALF:], resumed, strict=True):
        assert after["lr"] == before["lr"]
        assert after["tokens"] == before["tokens"] == before["step"] * 8 * 64
