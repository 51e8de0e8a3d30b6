from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import run_folder
from planning.findings import MachineError


def test_two_runs_of_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda form: "20260101-120000")
    folders = [run_folder.default_run_dir("gpt_1b", tmp_path) for _ in range(3)]
    assert [str(folder.relative_to(tmp_path)) for folder in folders] == [
        "gpt_1b/20260101-120000",
        "gpt_1b/20260101-120000-2",
        "gpt_1b/20260101-120000-3",
    ]
    assert all(folder.is_dir() for folder in folders)


def test_an_earlier_run_is_moved_aside_whole_and_nothing_else(tmp_path: Path) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run_dir / "checkpoints" / "iter_0000010").mkdir(parents=True)
    (run_dir / "plan.yaml").write_text("old")
    (run_dir / "notes.txt").write_text("of the user")
    (elsewhere / "iter_0000900").mkdir(parents=True)
    (elsewhere / "latest_checkpointed_iteration.txt").write_text("900")
    assert run_folder.has_run(run_dir)
    moved = run_folder.set_aside(run_dir, elsewhere)
    assert moved is not None
    assert moved.parent == run_dir
    assert (moved / "plan.yaml").read_text() == "old"
    assert (moved / "checkpoints" / "iter_0000010").is_dir()
    assert sorted(path.name for path in run_dir.iterdir()) == ["notes.txt", moved.name]
    assert [path.name for path in elsewhere.iterdir()] == [moved.name]
    assert not run_folder.has_run(run_dir)
    # Again within the second: an own folder.
    (run_dir / "plan.yaml").write_text("second")
    again = run_folder.set_aside(run_dir)
    assert again not in (None, moved)
    assert run_folder.set_aside(run_dir) is None


def test_checkpoints_elsewhere_are_an_earlier_run_too(tmp_path: Path) -> None:
    run_dir, elsewhere = tmp_path / "new", tmp_path / "elsewhere"
    (elsewhere / "iter_0000900").mkdir(parents=True)
    (elsewhere / "plan.yaml").write_text("old")
    assert not run_folder.has_run(run_dir)
    assert run_folder.has_run(run_dir, elsewhere)
    moved = run_folder.set_aside(run_dir, elsewhere)
    assert moved is not None
    assert sorted(path.name for path in moved.iterdir()) == ["iter_0000900", "plan.yaml"]
    assert not run_folder.has_run(run_dir, elsewhere)


def test_a_new_start_does_not_see_the_outcome_of_the_last(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "result.json").write_text('{"status": "done"}')
    (tmp_path / "logs" / "error-rank-3.json").write_text("{}")
    (tmp_path / "logs" / "rank-3.log").write_text("goes on")
    run_folder.begin(tmp_path)
    run_folder.begin(tmp_path)
    (before,) = (tmp_path / "logs").glob("before-*")
    assert sorted(path.name for path in before.iterdir()) == ["error-rank-3.json", "result.json"]
    assert (tmp_path / "logs" / "rank-3.log").exists()
    assert not (tmp_path / "result.json").exists()


def test_what_the_plan_became_here_is_written_down(tmp_path: Path) -> None:
    run_folder.begin(tmp_path)
    run_folder.write_environment(tmp_path, {"run:": "/r"}, {"OMP_NUM_THREADS": "1"})
    assert json.loads((tmp_path / "logs" / "environment.json").read_text()) == {
        "roots": {"run:": "/r"},
        "environment": {"OMP_NUM_THREADS": "1"},
        "shared_run_dir": True,
    }


def test_a_disk_without_room_is_refused_with_numbers(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    run_folder.free_space_check(tmp_path / "not" / "there", free // 2)
    with pytest.raises(MachineError) as refused:
        run_folder.free_space_check(tmp_path / "not" / "there", 2**60)
    (finding,) = refused.value.findings
    assert (finding.id, finding.setting) == ("disk_space", "checkpoint.save")
    assert "needs 1,073,741,824.0 GiB of disk" in finding.message
    assert "checkpoint.keep" in finding.fix


def test_a_small_disk_has_its_numbers_in_mib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**22))
    with pytest.raises(MachineError, match=r"needs 6\.0 MiB of disk, 4\.0 MiB are free there"):
        run_folder.free_space_check(tmp_path, 6 * 2**20)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"run_dir: cannot write to .*file/run: Not a directory"):
        run_folder.begin(tmp_path / "file" / "run")
