"""Every layout trains like one process: the same losses over 20 steps, in real processes.

FP32, the same data. What remains is the order of sums: each rounds at 6e-8 relative, and Adam
divides by the root of small second moments, which magnifies that a few hundred times over 20 steps;
1e-4 in a loss of about 5 is that and no more, while a wrong gradient shows from the third digit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import TINY, losses, prepare, torchrun

TOLERANCE = 1e-4
# name -> (processes, overrides); started from one checkpoint, as Megatron's initial weights depend
# on the layout
FROM_CHECKPOINT = {
    "tp2": (2, ["layout=tp2", "layout.sequence_parallel=false"]),
    "tp2_sp": (2, ["layout=tp2"]),
    "pp2": (2, ["layout=pp2"]),
    "pp2_vpp2": (2, ["layout=pp2", "layout.virtual_pipeline_parallel=2"]),
    "tp2_pp2": (4, ["layout=tp2_pp2"]),
}
# started from the same seed
FROM_SEED = {
    "replicated": (2, ["layout=replicated"]),
    "ddp": (2, ["layout=ddp"]),  # distributed optimizer, both overlaps
    "ddp_mbs1": (2, ["layout=ddp", "training.micro_batch_size=1"]),
    "fsdp": (2, ["layout=fsdp"]),
    "fsdp_optim_grads": (2, ["layout=fsdp", "layout.fsdp_strategy=optim_grads"]),
    "recompute_full": (1, ["layout=ddp", "layout.recompute=full"]),
    "recompute_selective": (1, ["layout=ddp", "layout.recompute=selective"]),
    "recompute_mlp": (
        1,
        ["layout=ddp", "layout.recompute=selective", "layout.recompute_modules=[mlp]"],
    ),
}
UNTIED = {"fsdp2": (2, ["layout=fsdp2", "model.tied_embeddings=false"])}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of every case, each run for real."""
    folder = tmp_path_factory.mktemp("parallel")
    initial = folder / "initial" / "checkpoints"
    load = f"checkpoint.load={initial}"
    single = ["layout=ddp"]
    cases: list[tuple[int, Path]] = []

    def add(name: str, processes: int, overrides: list[str]) -> None:
        ranks = f"hardware.gpus_per_node={processes}"
        cases.append((processes, prepare(folder / name, *TINY, ranks, *overrides)))

    # The reference writes, before its second step, what the others start from.
    add("initial", 1, [*single, "checkpoint.save=true", "training.train_steps=1",
                       "training.optimizer.warmup_steps=0"])  # fmt: skip
    add("one_from_seed", 1, single)
    add("one_from_checkpoint", 1, [*single, load])
    add("one_untied", 1, [*single, "model.tied_embeddings=false"])
    for name, (processes, overrides) in (FROM_SEED | UNTIED).items():
        add(name, processes, overrides)
    for name, (processes, overrides) in FROM_CHECKPOINT.items():
        add(name, processes, [*overrides, load])
    torchrun(cases)
    return {run_dir.name: losses(run_dir) for _, run_dir in cases}


def compare(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) == 20
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_one_process_learns(runs: dict[str, list[float]]) -> None:
    assert runs["one_from_seed"][0] == pytest.approx(5.6, abs=0.3)  # near ln(257)
    assert runs["one_from_seed"][-1] < 5.0
    assert runs["one_from_checkpoint"] != runs["one_from_seed"]


@pytest.mark.parametrize("name", FROM_CHECKPOINT)
def test_model_parallel_layouts_give_the_losses_of_one_process(
    runs: dict[str, list[float]], name: str
) -> None:
    compare(runs[name], runs["one_from_checkpoint"])


@pytest.mark.parametrize("name", FROM_SEED)
def test_data_parallel_layouts_and_recompute_give_the_losses_of_one_process(
    runs: dict[str, list[float]], name: str
) -> None:
    compare(runs[name], runs["one_from_seed"])


def test_fsdp2_gives_the_losses_of_one_process(runs: dict[str, list[float]]) -> None:
    compare(runs["fsdp2"], runs["one_untied"])
