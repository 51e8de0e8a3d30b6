from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from training.curve import draw, limits, read, short, smoothed


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def steps(first: int, last: int, loss: float = 2.0) -> list[dict[str, Any]]:
    return [
        {"step": step, "tokens": 512 * step, "loss": loss, "tokens_per_s_per_gpu": 1000.0}
        for step in range(first, last + 1)
    ]


def test_the_picture_shows_losses_where_they_are(tmp_path: Path) -> None:
    evaluations = [{"step": 100, "validation_loss": 2.5}, {"step": 100, "test_loss": 9.0}]
    lines = [*steps(1, 200), *evaluations]
    metrics = write(tmp_path / "metrics.jsonl", lines)
    assert draw(metrics, tmp_path / "loss.png", "a run") == (True, "")
    picture = imread(tmp_path / "loss.png")[:, :, :3]
    assert picture.shape == (780, 1170, 3)
    loss_panel = picture[100:550, 100:800]
    blue = np.argwhere(np.abs(loss_panel - [0x1F / 255, 0x5F / 255, 0xA8 / 255]).max(axis=2) < 0.1)
    red = np.argwhere(np.abs(loss_panel - [0xC8 / 255, 0x44 / 255, 0x2B / 255]).max(axis=2) < 0.1)
    assert np.ptp(blue[:, 0]) <= 6  # a constant loss is a level line
    assert np.ptp(blue[:, 1]) > 650  # over all steps
    assert red[:, 0].max() < blue[:, 0].min()  # 2.5 is above 2.0
    assert [path.name for path in tmp_path.glob("*loss*")] == ["loss.png"]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "holds no steps"),
        ([{"step": 5, "validation_loss": 1.0}], "holds no steps"),
        ([{"step": 1, "loss": None}, {"step": 2, "loss": float("nan")}], "finite"),
    ],
)
def test_without_a_loss_there_is_a_reason_and_the_old_picture_stays(
    tmp_path: Path, lines: list[dict[str, Any]], reason: str
) -> None:
    picture = tmp_path / "loss.png"
    picture.write_bytes(b"old")
    drawn, why = draw(write(tmp_path / "metrics.jsonl", lines), picture, "a run")
    assert not drawn
    assert reason in why
    assert picture.read_bytes() == b"old"


def test_a_missing_file_or_folder_is_a_reason_too(tmp_path: Path) -> None:
    assert draw(tmp_path / "none.jsonl", tmp_path / "loss.png", "")[1].startswith("FileNotFound")
    metrics = write(tmp_path / "metrics.jsonl", steps(1, 3))
    assert draw(metrics, tmp_path / "none" / "loss.png", "")[1].startswith("FileNotFound")


@pytest.mark.parametrize("last", [1, 2, 9, 10])
def test_few_steps_without_throughput_are_drawn(tmp_path: Path, last: int) -> None:
    lines = [{"step": step, "loss": 2.0} for step in range(1, last + 1)]
    metrics = write(tmp_path / "metrics.jsonl", lines)
    assert draw(metrics, tmp_path / "loss.png", "short") == (True, "")


def test_repeated_steps_are_the_later_start_s(tmp_path: Path) -> None:
    lines = [
        *steps(1, 8, loss=3.0),
        {"step": 5, "validation_loss": 3.5},
        {"step": 7, "validation_loss": 3.4},
        *steps(6, 10, loss=2.0),  # killed at 8, resumed from 5
        {"step": 10, "resumed": True},  # stopped at 10
        *steps(11, 12, loss=1.0),
    ]
    series = read(write(tmp_path / "metrics.jsonl", lines))
    assert series.step.tolist() == list(range(1, 13))
    assert series.loss.tolist() == [3.0] * 5 + [2.0] * 5 + [1.0] * 2
    assert series.tokens.tolist() == [512 * step for step in range(1, 13)]
    assert series.validation == {5: 3.5}
    assert series.resumed == [6, 11]


def test_a_cut_line_is_passed_over(tmp_path: Path) -> None:
    metrics = write(tmp_path / "metrics.jsonl", steps(1, 3))
    with open(metrics, "a") as file:
        file.write('{"step": 4, "lo')
    assert read(metrics).step.tolist() == [1, 2, 3]


def test_smoothing_follows_the_start_and_calms_the_end() -> None:
    start = np.array([11.0, 10.0, 9.0, 8.0])
    assert smoothed(start).tolist() == start.tolist()
    noise = np.where(np.arange(1000) % 2, 3.0, 1.0)
    assert np.abs(smoothed(noise)[500:] - 2.0).max() < 0.1
    holed = noise.copy()
    holed[700:] = np.nan
    assert np.isnan(smoothed(holed)[700:]).all()
    assert np.abs(smoothed(holed)[500:700] - 2.0).max() < 0.1


def test_the_axis_keeps_the_end_readable() -> None:
    fall = np.concatenate([np.linspace(11, 3, 50), np.linspace(3, 2.6, 950)])
    low, high = limits(fall, [2.7])
    assert 2.5 < low < 2.6
    assert 3.5 < high < 4.2  # the start at 11 is outside
    low, high = limits(np.array([5.0, 4.0, 3.0]), [])
    assert low < 3.0 < 5.0 < high  # a short run is inside


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (512, "512"), (12300, "12.3K"), (5e5, "500K"), (2.5e9, "2.5B")]
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text
