from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.display import Display, resume_command, summary
from training.events import EventLog, EventReader, format_event


def step(number: int, of: int = 100, **fields: object) -> dict[str, object]:
    return {"event": "step", "step": number, "train_steps": of, "loss": 2.5, **fields}


def on_terminal(columns: int, draw: Callable[[Display], None]) -> str:
    """What a terminal of this width receives from a display."""
    screen, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(device, "w", encoding="utf-8") as stream:
        draw(Display(stream))
    received = b""
    try:
        while chunk := os.read(screen, 65536):
            received += chunk
    except OSError:  # EIO: all is read
        pass
    os.close(screen)
    return received.decode()


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_pipe_gets_each_interval_and_the_last_step() -> None:
    stream = io.StringIO()
    display = Display(stream, interval=10)
    for number in range(1, 26):
        display.event(step(number))
    display.event({"event": "validation", "step": 25, "validation_loss": 2.75})
    display.event({"event": "ready"})  # nothing to say of it
    display.close()
    assert stream.getvalue().splitlines() == [
        "step 1/100  loss 2.5000",
        "step 10/100  loss 2.5000",
        "step 20/100  loss 2.5000",
        "step 25: validation loss 2.7500",
        "step 25/100  loss 2.5000",
    ]


def test_the_time_left_is_by_the_median_step() -> None:
    stream = io.StringIO()
    display = Display(stream, interval=10)
    for number in range(1, 11):
        # One step of 500 s, as with a slow disk, does not count.
        display.event(step(number, of=110, step_s=500.0 if number == 5 else 2.0))
    assert stream.getvalue().splitlines()[-1].endswith("2 s/step  3:20 left")


@pytest.mark.parametrize("columns", [12, 40, 60, 200])
def test_no_line_reaches_the_last_column(columns: int) -> None:
    def draw(display: Display) -> None:
        display.phase("importing Megatron, which takes a while")
        for number in (99998, 99999):
            display.event(
                step(number, of=100000, step_s=0.5, tokens_per_s_per_gpu=51234.0, mfu=0.412,
                     memory_gib=70.0, grad_norm=1.5, lr=3e-4)
            )  # fmt: skip

    lines = on_terminal(columns, draw).split("\r\x1b[K")
    assert len(lines) == 4
    assert max(map(len, lines)) < columns
    assert "\n" not in "".join(lines)
    assert lines[-1].startswith(("█" * 20 + "  step 99999/100000  loss 2.5000")[: columns - 1]) == (
        columns == 200
    )
    assert lines[-1].endswith("learning rate 3.00e-04  0 s left") == (columns == 200)


def test_the_line_keeps_its_order_when_no_time_is_left() -> None:
    rates = {"tokens_per_s_per_gpu": 1000.0, "step_s": 0.5, "memory_gib": 1.0}

    def draw(display: Display) -> None:
        for number in (99, 100):
            display.event(step(number, **rates))

    lines = on_terminal(100, draw).split("\r\x1b[K")
    order = "loss 2.5000  1,000 tokens/s/GPU  0.5 s/step  1.0 GiB"
    assert lines[-2].endswith(f"step 99/100  {order}")
    assert lines[-1].strip().endswith(f"step 100/100  {order}")


def test_what_stays_pushes_the_progress_line_down() -> None:
    def draw(display: Display) -> None:
        display.event(step(10))
        display.event({"event": "checkpoint", "step": 10, "path": "c/iter_10", "seconds": 1.25})
        display.close()

    rows = on_terminal(100, draw).split("\r\n")
    bar = "██" + "░" * 18
    assert rows == [
        f"\r\x1b[K{bar}  step 10/100  loss 2.5000\r\x1b[Kstep 10: saved c/iter_10 in 1.2 s",
        f"\r\x1b[K{bar}  step 10/100  loss 2.5000",
        "",
    ]


def test_colour_is_left_out_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    warning = {"event": "warning", "text": "slow disk"}
    assert on_terminal(80, lambda display: display.event(warning)) == (
        "\x1b[33mwarning: slow disk\x1b[0m\r\n"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal(80, lambda display: display.event(warning)) == "warning: slow disk\r\n"


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert on_terminal(80, lambda display: display.event(step(1))) == (
        "step 1/100  loss 2.5000\r\n"
    )


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    display = Display(open(writing, "w"))
    for number in range(1, 4):
        display.event(step(number))
    display.close()


def test_lines_are_read_whole_even_if_they_come_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "phase", "text": "of an earlier start"}\n')
    reader = EventReader(path)
    assert reader.read() == []
    EventLog(path).write("phase", text="now")
    with open(path, "a") as file:
        file.write('{"event": "rea')
    assert reader.read() == [{"event": "phase", "text": "now"}]
    with open(path, "a") as file:
        file.write('dy"}\nno event\n[1]\n')
    assert reader.read() == [{"event": "ready"}]


def test_events_as_text() -> None:
    full = step(7, tokens_per_s_per_gpu=5120.4, step_s=0.25, mfu=0.4123, memory_gib=12.34)
    assert format_event(full) == (
        "step 7/100  loss 2.5000  5,120 tokens/s/GPU  0.25 s/step  MFU 41.2%  12.3 GiB"
    )
    assert "5,120 tokens/s/process" in format_event({**full, "device": "cpu"})
    assert format_event(step(7, loss=float("nan"))) == "step 7/100  loss not finite"
    test = {"event": "validation", "step": 9, "test_loss": 1.5}
    assert format_event(test) == "step 9: test loss 1.5000"
    assert format_event({"event": "phase", "text": "saving"}) == "saving"
    assert format_event({"event": "of a later version"}) == ""


RESULT = {
    "status": "stopped",
    "steps": 1200,
    "final_loss": 2.25,
    "validation_loss": 2.5,
    "test_loss": None,
    "median_tokens_per_s_per_gpu": 51234.5,
    "peak_memory_gib": 70.25,
    "checkpoint": "runs/a/checkpoints/iter_0001200",
    "seconds": 3725.0,
}


def test_the_summary_says_how_to_go_on(tmp_path: Path) -> None:
    for name in ("loss.png", "metrics.jsonl"):
        (tmp_path / name).touch()
    text = summary(RESULT, tmp_path, ["model=gpt_1b", "resume=none"], notes=["BF16 by FP32."])
    assert text.splitlines() == [
        "stopped          1,200 steps in 1:02:05",
        "training loss    2.2500 nats a token",
        "validation loss  2.5000 nats a token",
        "speed            51,234 tokens/s/GPU (median)",
        "peak memory      70.2 GiB per GPU",
        f"loss curve       {tmp_path}/loss.png",
        f"metrics          {tmp_path}/metrics.jsonl",
        "checkpoint       runs/a/checkpoints/iter_0001200",
        f"resume           python launch/train.py model=gpt_1b run_dir={tmp_path}",
        "BF16 by FP32.",
    ]


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    text = summary({**RESULT, "status": "done"}, tmp_path, ["training.train_steps=1200"])
    assert text.splitlines()[-1] == (
        f"train further    python launch/train.py training.train_steps=2400 run_dir={tmp_path}"
    )


def test_a_failure_before_the_first_step_has_no_checkpoint_to_name(tmp_path: Path) -> None:
    text = summary({"status": "failed", "message": "rank 0 failed"}, tmp_path, [])
    assert text == "failed  before the first step"


def test_a_resumed_run_tells_its_own_steps_from_all(tmp_path: Path) -> None:
    text = summary({**RESULT, "first_step": 1001}, tmp_path, [])
    assert text.splitlines()[0] == "stopped          1,200 steps, 200 of them now, in 1:02:05"


def test_the_resume_command_can_be_pasted_into_a_shell() -> None:
    words = ["data.paths=[0.3, a]", "+run_dir=old", "model=gpt_1b"]
    assert resume_command(words, Path("runs/my run")) == (
        "python launch/train.py 'data.paths=[0.3, a]' model=gpt_1b 'run_dir=runs/my run'"
    )
