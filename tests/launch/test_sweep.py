"""A sweep: each job has its own end, a table says all of them, and Ctrl-C ends the sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import compose, machine, run, sweep
from launch.train import main
from planning.resolve import resolve
from planning.schema import RunConfig
from tests.choices import CPU, ROOT
from tests.training.runs import CACHE
from training.data import library_text

PLAN = ["-m", "launch=plan"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "look", lambda: CPU)
    monkeypatch.setattr(library_text, "expected", lambda *_: None)
    return tmp_path


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def rows(text: str) -> list[list[str]]:
    """The table's cells: number, status, choice."""
    table = text[text.index("job  status") :].splitlines()[1:]
    found = []
    for line in table:
        if not line or not line[0].isdigit():
            break
        number, status, *_, choice = [cell for cell in line.split("  ") if cell.strip()]
        found.append([number, status.strip(), choice.strip()])
    return found


def test_combinations_are_all_values_with_all() -> None:
    words = ["model=gpt_1b,gpt_3b", "data.paths=[a,b]", "training.seed=range(1,3)", "launch=plan"]
    assert compose.combinations(words) == [
        [f"model={model}", "data.paths=[a,b]", f"training.seed={seed}", "launch=plan"]
        for model in ("gpt_1b", "gpt_3b")
        for seed in (1, 2)
    ]
    assert compose.combinations(["precision=bench/fp8,fp8"]) == [
        ["precision=bench/fp8"],
        ["precision=fp8"],
    ]
    assert compose.combinations([]) == [[]]


def test_a_sweep_of_plans_says_what_each_is_predicted_to_take(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=gpt_8b", "hardware=p6_b200", "layout=ddp", "training.micro_batch_size=2,16"]
    priced = "hardware.price_per_node_hour=100"
    assert main([*PLAN, *words, priced, "run_dir=s"]) == 2
    table = (here / "s" / "sweep.txt").read_text().splitlines()
    assert table[0].split("  ")[0] == "job"
    fits, too_large = ([cell.strip() for cell in line.split("  ") if cell.strip()]
                       for line in table[1:3])  # fmt: skip
    plan = json.loads((here / "s" / "0" / "plan.json").read_text())
    assert fits[1:4] == ["done", f"{plan['memory']['needed_gib']:.0f}", "yes"]
    assert fits[4] == f"{plan['throughput']['tokens_per_s_per_gpu']:,.0f}"
    assert fits[7] == f"{plan['cost']['usd_per_billion_tokens']:,.0f}"
    assert fits[8] == "DP8, MBS 2"
    assert too_large[1:4:2] == ["wrong choice", "no"]
    assert int(too_large[2]) > plan["memory"]["capacity_gib"]


def test_jobs_have_folders_of_one_sweep_and_nothing_else_is_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, "training.train_steps=5,6", "run_dir=s"]) == 0
    plans = ["plan.json", "plan.yaml"]
    assert written(here) == sorted(
        [*(f"s/{job}/{file}" for job in "01" for file in plans), "s/sweep.json", "s/sweep.txt"]
    )
    screen = capsys.readouterr().out
    assert (here / "s" / "sweep.txt").read_text() in screen
    assert "train_steps: 6\n" in (here / "s" / "1" / "plan.yaml").read_text()
    first, second = json.loads((here / "s" / "sweep.json").read_text())
    assert first["run_dir"] == "s/0"
    assert second["overrides"] == ["launch=plan", "training.train_steps=6", "run_dir=s"]


def test_a_sweep_has_one_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "run_dir=a,b"]) == 2
    assert "error: run_dir: a sweep has one, and here it is a" in capsys.readouterr().err
    assert not (here / "a" / "1").exists()


def test_without_a_run_dir_the_sweep_has_a_new_folder(here: Path) -> None:
    assert main([*PLAN, "training.train_steps=5,6"]) == 0
    (sweep_folder,) = (here / "runs" / "gpt_tiny").iterdir()
    assert sorted(path.name for path in sweep_folder.iterdir()) == [
        "0",
        "1",
        "sweep.json",
        "sweep.txt",
    ]


def test_a_bad_job_does_not_lose_the_others(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt_tiny,gpt_33b,moe_tiny", "training.micro_batch_size=8,x", "run_dir=s"]
    assert main([*PLAN, *words]) == 2
    captured = capsys.readouterr()
    found = rows(captured.out)
    assert [row[:2] for row in found] == [
        ["0", "done"],
        ["1", "wrong choice"],
        ["2", "wrong choice"],
        ["3", "wrong choice"],
        ["4", "done"],
        ["5", "wrong choice"],
    ]
    assert found[4][2] == "model=moe_tiny training.micro_batch_size=8"
    assert "\nin all: launch=plan run_dir=s\n" in captured.out
    assert captured.err.count("error: training.micro_batch_size: 'x' is not legal") == 2
    assert captured.err.count("error: model: there is no 'gpt_33b'") == 2
    assert (here / "s" / "4" / "plan.yaml").exists()
    assert not (here / "s" / "1").exists()


def test_a_sweep_of_bad_jobs_leaves_nothing(here: Path) -> None:
    assert main([*PLAN, "training.micro_batch_size=3,5"]) == 2
    assert main([*PLAN, "model=gpt_33b,gpt_34b"]) == 2
    assert list(here.iterdir()) == []


def test_what_the_machine_cannot_do_is_worse_than_a_wrong_choice(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["precision=mxfp8,bf16", "training.global_batch_size=16,20", "run_dir=s"]
    assert main([*PLAN, *words]) == 3
    statuses = [row[1] for row in rows(capsys.readouterr().out)]
    assert statuses == ["not on this machine", "wrong choice", "done", "wrong choice"]


@pytest.mark.parametrize(
    ("statuses", "whole"),
    [([0, 0], 0), ([0, 2], 2), ([2, 3, 0], 3), ([3, 1, 2], 1), ([1, 143], 143), ([0], 0)],
)
def test_the_status_of_the_whole(statuses: list[int], whole: int) -> None:
    assert sweep.overall(statuses) == whole


def ended(config: RunConfig, status: int, result: dict[str, Any] | None = None) -> run.Ended:
    return run.Ended(status, None, result or {}, resolve(config))


def test_a_job_that_fails_or_breaks_is_one_row(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(
        config: RunConfig, overrides: list[str], run_dir: Path | None, *_: Any
    ) -> run.Ended:
        if config.training.seed == 2:
            raise RuntimeError("a fault of ours")
        result = {"final_loss": 2.5, "median_tokens_per_s_per_gpu": 1234.5}
        return ended(config, int(config.training.seed == 1), result)

    monkeypatch.setattr(sweep, "execute", execute)
    assert main(["-m", "training.seed=1,2,3", "hardware=cpu"]) == 1
    captured = capsys.readouterr()
    assert [row[1] for row in rows(captured.out)] == ["failed", "failed", "done"]
    assert "2.5000" in captured.out
    assert "1,234" in captured.out
    assert "RuntimeError: a fault of ours" in captured.err


@pytest.mark.parametrize("how", ["status", "interrupt"])
def test_a_stop_ends_the_sweep(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    started = []

    def execute(
        config: RunConfig, overrides: list[str], run_dir: Path | None, *_: Any
    ) -> run.Ended:
        started.append(config.training.seed)
        if how == "interrupt" and config.training.seed == 2:
            raise KeyboardInterrupt
        return ended(config, 143 if config.training.seed == 2 else 0)

    monkeypatch.setattr(sweep, "execute", execute)
    assert main(["-m", "training.seed=1,2,3,4", "hardware=cpu"]) == 143
    assert started == [1, 2]
    statuses = [row[1] for row in rows(capsys.readouterr().out)]
    assert statuses == ["done", "stopped", "not started", "not started"]


def test_ctrl_c_stops_a_real_sweep(tmp_path: Path) -> None:
    """In the first job's training: it saves, and the second is not started."""
    words = ["-m", "training.seed=1,2", "training.train_steps=2000", "training.eval_interval=0"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "train.py"), *words, "run_dir=s",
         f"data.cache={CACHE}"],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    metrics = tmp_path / "s" / "0" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and '"step": 3' in metrics.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    screen, _ = process.communicate(timeout=100)
    assert process.returncode == 143, screen
    assert [row[:2] for row in rows(screen)] == [["0", "stopped"], ["1", "not started"]]
    assert list((tmp_path / "s" / "0" / "checkpoints").glob("iter_*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        "0",
        "sweep.json",
        "sweep.txt",
    ]
