"""Against folders that Megatron's and torch's own writers have made, cut at each place."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from training.checkpoints import (
    SAVED,
    TRACKER,
    checkpoints,
    inspect,
    newest_complete,
    prepare_resume,
    prune,
    prune_part,
)

ROOT = Path(__file__).resolve().parents[2]
WRITE_BOTH = """
import sys
from training import cpu_standin
cpu_standin.install()
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

if __name__ == "__main__":
    megatron, torchs, store = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    weight = torch.arange(2048.0).reshape(64, 32)
    state = {"w": ShardedTensor.from_rank_offsets("w", weight), "iteration": 5}
    dist_checkpointing.save(state, megatron)
    dcp.save({"w": weight, "step": 5}, storage_writer=dcp.FileSystemWriter(torchs))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torch_dist/ and dcp/, each a checkpoint by its own writer."""
    folder = tmp_path_factory.mktemp("written")
    script = folder / "write.py"
    script.write_text(WRITE_BOTH)
    (folder / "torch_dist").mkdir()
    subprocess.run(
        [sys.executable, script, folder / "torch_dist", folder / "dcp", folder / "store"],
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture
def folder(tmp_path: Path, written: Path) -> Path:
    """checkpoints/ of steps 5 to 25, all complete."""
    for step in range(5, 30, 5):
        shutil.copytree(written / "torch_dist", tmp_path / f"iter_{step:07d}")
    (tmp_path / TRACKER).write_text("25")
    return tmp_path


def iteration(folder: Path, step: int) -> Path:
    return folder / f"iter_{step:07d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["torch_dist", "dcp"])
def test_what_the_writers_leave_is_complete(written: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(written / kind, iteration(tmp_path, 5))
    state = inspect(iteration(tmp_path, 5))
    assert (state.step, state.complete, state.reason, state.format) == (5, True, "", kind)
    assert state.size >= 64 * 32 * 4
    assert state.size == sum(path.stat().st_size for path in state.path.glob("*.distcp"))


@pytest.mark.parametrize("kind", ["torch_dist", "dcp"])
def test_a_cut_at_each_place_is_found(written: Path, tmp_path: Path, kind: str) -> None:
    def cut(name: str, keep: float | None) -> str:
        path = iteration(tmp_path, 5)
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(written / kind, path)
        content = (path / name).read_bytes()
        (path / name).unlink()
        if keep is not None:
            (path / name).write_bytes(content[: int(keep * len(content))])
        state = inspect(path)
        assert not state.complete
        return state.reason

    size = (written / kind / "__0_0.distcp").stat().st_size
    assert cut(".metadata", None) == "the save was cut off before .metadata was written"
    assert cut(".metadata", 0) == ".metadata is cut short or damaged"
    assert cut(".metadata", 0.9) == ".metadata is cut short or damaged"
    assert cut("__0_0.distcp", None) == "its file __0_0.distcp is missing"
    assert cut("__0_0.distcp", 0.5) == f"its file __0_0.distcp has {size // 2} of {size} bytes"
    if kind == "torch_dist":
        unfinished = "the save was cut off before metadata.json was written"
        assert cut("metadata.json", None) == unfinished
        assert cut("metadata.json", 0.5) == unfinished


def test_reading_runs_nothing_of_the_file(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "touched",)  # type: ignore[return-value]

    iteration(tmp_path, 5).mkdir()
    (iteration(tmp_path, 5) / ".metadata").write_bytes(pickle.dumps(Harmful()))
    assert inspect(iteration(tmp_path, 5)).reason == ".metadata is cut short or damaged"
    assert not (tmp_path / "touched").exists()


def test_a_legacy_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    (iteration(tmp_path, 5) / "mp_rank_00").mkdir(parents=True)
    assert "legacy torch format" in inspect(iteration(tmp_path, 5)).reason


def test_only_iterations_are_checkpoints(folder: Path) -> None:
    (folder / "iter_0000030.broken").mkdir()
    (folder / "plan.yaml").write_text("")
    assert [state.step for state in checkpoints(folder)] == [5, 10, 15, 20, 25]
    assert all(state.complete for state in checkpoints(folder))
    assert checkpoints(folder / "none") == []


def test_a_resume_takes_the_newest_complete_and_says_why(folder: Path) -> None:
    (iteration(folder, 25) / "__0_0.distcp").unlink()
    (iteration(folder, 20) / "metadata.json").unlink()
    (folder / TRACKER).write_text("")  # cut while Megatron rewrote it
    newest = prepare_resume(folder)
    assert str(newest).splitlines() == [
        "passed over iter_0000025: its file __0_0.distcp is missing",
        "passed over iter_0000020: the save was cut off before metadata.json was written",
        "resuming from iter_0000015",
    ]
    assert (folder / TRACKER).read_text() == "15"
    assert names(folder) == [
        "iter_0000005",
        "iter_0000010",
        "iter_0000015",
        "iter_0000020.broken",
        "iter_0000025.broken",
        TRACKER,
    ]
    # The same step broken again: both stay.
    iteration(folder, 20).mkdir()
    assert str(prepare_resume(folder)).endswith("resuming from iter_0000015")
    assert "iter_0000020.broken-2" in names(folder)


def test_a_save_that_was_cut_before_the_tracker_is_complete(folder: Path) -> None:
    (folder / TRACKER).write_text("20")
    newest = prepare_resume(folder)
    assert newest.taken is not None
    assert (newest.taken.step, newest.passed_over) == (25, [])
    assert (folder / TRACKER).read_text() == "25"


def test_without_a_complete_one_training_starts_anew(tmp_path: Path) -> None:
    assert str(prepare_resume(tmp_path / "none")) == ""
    iteration(tmp_path, 5).mkdir()
    (tmp_path / TRACKER).write_text("5")
    assert str(prepare_resume(tmp_path)).endswith(
        "no complete checkpoint: starting from the first step"
    )
    assert names(tmp_path) == ["iter_0000005.broken"]


def test_pruning_keeps_the_newest_complete_ones(folder: Path) -> None:
    (iteration(folder, 25) / ".metadata").unlink()  # being saved, or broken: does not count
    deleted = prune(folder, keep=2)
    assert [path.name for path in deleted] == ["iter_0000005", "iter_0000010"]
    assert names(folder) == ["iter_0000015", "iter_0000020", "iter_0000025", TRACKER]
    assert newest_complete(folder).taken == inspect(iteration(folder, 20))
    assert prune(folder, keep=2) == []


def test_pruning_spares_what_the_tracker_names_and_finishes_what_was_cut(folder: Path) -> None:
    (folder / TRACKER).write_text("5")
    (folder / "iter_0000001.deleting").mkdir()
    assert [path.name for path in prune(folder, keep=1)] == [
        "iter_0000010",
        "iter_0000015",
        "iter_0000020",
    ]
    assert names(folder) == ["iter_0000005", "iter_0000025", TRACKER]
    with pytest.raises(ValueError, match="at least the newest"):
        prune(folder, keep=0)


def steps(folder: Path) -> list[int]:
    return [state.step for state in checkpoints(folder)]


def part_of(folder: Path, step: int, *, marked: bool = True) -> None:
    """What a node has of a step whose metadata another node wrote."""
    shutil.rmtree(iteration(folder, step), ignore_errors=True)
    iteration(folder, step).mkdir()
    (iteration(folder, step) / "__8_0.distcp").write_bytes(b"shard")
    if marked:
        (iteration(folder, step) / SAVED).touch()


def test_a_step_that_another_node_lacks_is_passed_over(folder: Path) -> None:
    newest = prepare_resume(folder, at_most=15)
    assert newest.taken is not None
    assert newest.taken.step == 15
    assert [(state.step, state.reason) for state in newest.passed_over] == [
        (25, "another node does not have it whole"),
        (20, "another node does not have it whole"),
    ]
    assert steps(folder) == [5, 10, 15]
    assert (folder / TRACKER).read_text() == "15"
    assert prepare_resume(folder, at_most=0).taken is None
    assert not (folder / TRACKER).exists()


def test_a_node_prunes_its_parts_by_what_all_ranks_saved(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        part_of(tmp_path, step)
    part_of(tmp_path, 20, marked=False)
    assert prune_part(tmp_path, 2, saved=20) == [iteration(tmp_path, 5), iteration(tmp_path, 10)]
    assert steps(tmp_path) == [15, 20]
    assert (iteration(tmp_path, 20) / SAVED).exists()


def test_a_part_of_a_save_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    part_of(tmp_path, 5)
    part_of(tmp_path, 10)
    part_of(tmp_path, 15, marked=False)  # cut off
    part_of(tmp_path, 20, marked=False)
    # 10 and 20 are the newest two; what lies between stays, and would be used by no one.
    assert prune_part(tmp_path, 2, saved=20) == [iteration(tmp_path, 5)]
    assert steps(tmp_path) == [10, 15, 20]
    assert prune_part(tmp_path, 1, saved=20) == [iteration(tmp_path, 10), iteration(tmp_path, 15)]


def test_a_nodes_whole_copies_of_an_earlier_job_count(folder: Path) -> None:
    part_of(folder, 30, marked=False)
    assert [path.name for path in prune_part(folder, 3, saved=30)] == [
        "iter_0000005",
        "iter_0000010",
        "iter_0000015",
    ]
    assert prune_part(folder, 1, saved=99) == []  # its ranks wrote nothing of that step


def test_pruning_keeps_at_least_one(tmp_path: Path) -> None:
    for function in (lambda: prune(tmp_path, 0), lambda: prune_part(tmp_path, 0, 5)):
        with pytest.raises(ValueError, match="keep is 0"):
            function()
