"""The line of a job's log: printed and read back by the same module."""

from __future__ import annotations

import re

import pytest

from training.events import LOG_METRICS, log_line, read_log_line

STEP = {
    "event": "step",
    "step": 7,
    "loss": 2.046612345,
    "tokens_per_s_per_gpu": 17835.18,
    "mfu": 0.41199,
    "memory_gib": 71.304,
    "grad_norm": 1.5,
    "lr": 3e-4,
}


def read(line: str) -> dict[str, float]:
    """What CloudWatch would draw of a line."""
    found = {name: re.search(expression, line) for name, expression in LOG_METRICS.items()}
    return {name: float(match[1]) for name, match in found.items() if match}


def test_a_step_is_a_line_whose_values_are_read_back() -> None:
    line = log_line(STEP)
    assert line == ("step=7 loss=2.04661 tokens_per_s_per_gpu=17835.2 mfu=0.4120 memory_gib=71.30")
    assert read(line) == {
        "loss": 2.04661,
        "tokens_per_s_per_gpu": 17835.2,
        "mfu": 0.412,
        "memory_gib": 71.3,
    }


@pytest.mark.parametrize("loss", [1.25e-7, 3.4e12, 0.0, -0.5])
def test_losses_of_any_size_are_read_back(loss: float) -> None:
    assert read(log_line(STEP | {"loss": loss}))["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_validation_is_not_taken_for_a_training_loss() -> None:
    line = log_line({"event": "validation", "step": 50, "validation_loss": 2.5736})
    assert line == "step=50 validation_loss=2.5736"
    assert read(line) == {"validation_loss": 2.5736}


def test_what_was_not_measured_is_not_drawn() -> None:
    line = log_line(STEP | {"loss": None, "mfu": None})
    assert line == "step=7 loss=nan tokens_per_s_per_gpu=17835.2 memory_gib=71.30"
    assert set(read(line)) == {"tokens_per_s_per_gpu", "memory_gib"}


def test_other_events_have_no_such_line() -> None:
    assert log_line({"event": "phase", "text": "reading the data"}) == ""


def test_a_line_is_read_back_as_the_event_that_it_was() -> None:
    assert read_log_line(log_line(STEP)) == {
        "event": "step",
        "step": 7,
        "loss": 2.04661,
        "tokens_per_s_per_gpu": 17835.2,
        "mfu": 0.412,
        "memory_gib": 71.3,
    }
    validation = {"event": "validation", "step": 50, "validation_loss": 2.5}
    assert read_log_line(log_line(validation)) == validation
    assert read_log_line(log_line({"event": "step", "step": 1, "loss": None})) == {
        "event": "step",
        "step": 1,
        "loss": None,
    }
    assert read_log_line("step by step=7") is None
