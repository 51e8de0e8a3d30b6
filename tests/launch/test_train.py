"""The one command, as a person runs it: real processes, real text, real checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.training.runs import CACHE, ROOT

ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *overrides]
    return subprocess.Popen(
        [*command, f"run_dir={run_dir}", f"data.cache={CACHE}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        cwd=run_dir.parent,
    )


def finish(process: subprocess.Popen[str], status: int) -> str:
    screen, _ = process.communicate(timeout=400)
    assert process.returncode == status, screen
    return screen


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run_dir) if "loss" in line}


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and max(losses_so_far(run_dir), default=0) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} in {run_dir}")


def losses_so_far(run_dir: Path) -> list[int]:
    text = (run_dir / "metrics.jsonl").read_text()
    whole = text[: text.rfind("\n") + 1]
    return [line["step"] for line in map(json.loads, whole.splitlines()) if "loss" in line]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """`python launch/train.py` as it stands: (its folder, what was on the screen)."""
    run_dir = tmp_path_factory.mktemp("default") / "run"
    return run_dir, finish(start(run_dir), 0)


def test_the_default_learns_the_text(default_run: tuple[Path, str]) -> None:
    run_dir, screen = default_run
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "done"
    assert result["steps"] == 200
    assert result["validation_loss"] < 2.3  # a unigram model of the bytes: 3.23
    assert f"validation loss  {result['validation_loss']:.4f} nats a byte" in screen
    assert len(losses(run_dir)) == 200
    assert losses(run_dir)[1] == pytest.approx(5.55, abs=0.15)  # ln 257


def test_the_screen_is_for_a_person(default_run: tuple[Path, str]) -> None:
    run_dir, screen = default_run
    assert "model      gpt_tiny: 427 K parameters, 2 blocks" in screen
    assert "step 200/200" in screen
    assert f"loss curve       {run_dir}/loss.png" in screen
    assert f"run_dir={run_dir}" in screen.splitlines()[-1] + screen  # how to go on
    assert len(screen.splitlines()) < 70
    for chatter in ("Warning", "megatron.core", "WARNING", "> building", "arguments"):
        assert chatter not in screen
    assert "end of arguments" in (run_dir / "logs" / "rank-0.log").read_text()


def test_the_run_folder_holds_what_the_readme_says(default_run: tuple[Path, str]) -> None:
    run_dir, _ = default_run
    assert (run_dir / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("iter_*"))
    assert kept == ["iter_0000100", "iter_0000200"]
    verdict = json.loads((run_dir / "plan.json").read_text())
    assert verdict["legal"] is True
    assert set(verdict) == {"legal", "findings", "memory", "throughput", "cost", "basis"}
    last = [line for line in lines(run_dir) if "loss" in line][-1]
    assert set(last) == {
        *("step", "tokens", "loss", "grad_norm", "lr", "step_s"),
        *("tokens_per_s_per_gpu", "mfu", "memory_gib"),
    }
    assert last["tokens"] == 200 * 16 * 128


def test_a_finished_run_says_so(default_run: tuple[Path, str]) -> None:
    run_dir, _ = default_run
    before = (run_dir / "result.json").read_text()
    screen = finish(start(run_dir), 0)
    assert "all 200 steps are trained" in screen
    assert (run_dir / "result.json").read_text() == before


def test_a_stopped_run_goes_on_to_the_bit(default_run: tuple[Path, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    steps = ["training.optimizer.decay_steps=200", "training.eval_interval=0"]
    process = start(run_dir, *steps, "training.train_steps=200")
    wait_for_step(run_dir, 12)
    process.send_signal(signal.SIGTERM)
    screen = finish(process, 143)
    stopped = json.loads((run_dir / "result.json").read_text())
    assert stopped["status"] == "stopped"
    assert "stopped" in screen
    assert stopped["steps"] >= 12
    again = finish(start(run_dir, *steps, f"training.train_steps={stopped['steps'] + 10}"), 0)
    assert f"resuming from iter_{stopped['steps']:07d}" in again
    assert "training.train_steps: 200 ->" in again
    found = losses(run_dir)
    whole = losses(default_run[0])
    assert list(found) == list(range(1, stopped["steps"] + 11))
    assert found == {step: whole[step] for step in found}


def test_a_kill_at_any_moment_loses_nothing_saved(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    choice = ["checkpoint.interval=1", "training.eval_interval=0", "training.train_steps=12"]
    process = start(run_dir, *choice, "checkpoint.keep=3")
    wait_for_step(run_dir, 4)  # a save follows each step: most of the time is in one
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, f"orphans: {alive}; {len(gone)} ended"
    saved = [int(path.name[5:]) for path in (run_dir / "checkpoints").glob("iter_???????")]
    screen = finish(start(run_dir, *choice), 0)
    resumed = int(screen.split("resuming from iter_")[1][:7])
    assert resumed >= max(saved) - 1 >= 2
    assert list(losses(run_dir)) == list(range(1, 13))


def test_another_model_is_refused_in_a_used_folder(default_run: tuple[Path, str]) -> None:
    run_dir, _ = default_run
    screen = finish(start(run_dir, "model.num_layers=4", "training.global_batch_size=32"), 2)
    assert "model.num_layers" in screen
    assert "holds a run with 2, this one has 4" in screen
    assert "training.global_batch_size" in screen
    assert "resume=none" in screen


def test_a_large_model_is_planned_and_told_where_to_go(tmp_path: Path) -> None:
    screen = finish(start(tmp_path / "run", "model=gpt_32b", "precision=nvfp4"), 3)
    assert "gpt_32b: 32.6 B parameters, 64 blocks" in screen
    assert "cannot compute nvfp4; b200, b300, gb200, gb300 can" in screen
    assert "hardware=p6_b200" in screen
    assert "launch=plan" in screen
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    wild = ["training.optimizer.learning_rate=1e30", "training.optimizer.warmup_steps=0"]
    few = ["precision=fp32", "training.train_steps=4", "training.eval_interval=0"]
    screen = finish(start(run_dir, *wild, *few, "checkpoint.interval=1"), 1)
    assert "step 2: the gradient is not finite" in screen
    assert "training.check_nan=false" in screen
    assert [path.name for path in (run_dir / "checkpoints").glob("iter_*")] == ["iter_0000001"]
    assert lines(run_dir)[-1]["grad_norm"] is None  # and the record shows where
