"""What a person sees of a run: a line that updates in place on a terminal, plain lines elsewhere.

The line is written by hand and not with rich: rich hides the cursor and needs a clean exit to
show it again, which a killed process does not get.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from training.events import Event, format_event, number, step_parts, throughput

_ERASE = "\r\x1b[K"  # to the first column, and clear to the end of the line
_BAR = 20  # columns
_RECENT = 50  # steps whose median time the ETA is from


class Display:
    """Shows a run's events on `stream`.

    interval: steps between progress lines where the stream is not a terminal.
    """

    def __init__(self, stream: TextIO | None = None, interval: int = 1) -> None:
        self._stream = stream or sys.stdout
        self._interval = interval
        self._in_place = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._color = self._in_place and not os.environ.get("NO_COLOR")
        encoding = (getattr(self._stream, "encoding", None) or "ascii").lower()
        self._full, self._empty = ("█", "░") if "utf" in encoding else ("#", "-")
        self._step: Event | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._phase, self._phase_since = "", 0.0
        self._unsaid: Event | None = None  # the last step, where no line has been printed for it
        self._shown = ""
        self._gone = False  # the stream

    def event(self, event: Event) -> None:
        """Show one event of logs/events.jsonl."""
        kind = event["event"]
        if kind == "step":
            self._on_step(event)
        elif kind == "phase":
            self.phase(event["text"])
        elif text := format_event(event):
            self._phase = ""
            self.message(text, color="33" if kind == "warning" else "")

    def phase(self, text: str) -> None:
        """Say what is being done now; on a terminal it goes away when it is over."""
        self._phase, self._phase_since = text, time.monotonic()
        if self._in_place:
            self.tick()
        else:
            self._write(text + "\n")

    def message(self, text: str, color: str = "") -> None:
        """A line that stays. `color`: an SGR code, used on a terminal without NO_COLOR."""
        if color and self._color:
            text = f"\x1b[{color}m{text}\x1b[0m"
        self._write((_ERASE if self._shown else "") + text + "\n")
        self._shown = ""
        self.tick()

    def tick(self) -> None:
        """Redraw the line in place, if anything on it has changed."""
        if not self._in_place:
            return
        # The last column stays free: a terminal may wrap when it is filled.
        line = self._line(self._columns() - 1)
        if line != self._shown:
            self._write(_ERASE + line)
            self._shown = line

    def close(self) -> None:
        """End the line; in a log, say the last step if its line was left out."""
        self._phase = ""
        if self._in_place:
            self.tick()
            if self._shown:
                self._write("\n")
            self._shown, self._step = "", None
        elif self._unsaid:
            self._write(format_event(self._unsaid) + "\n")
            self._unsaid = None

    def _on_step(self, event: Event) -> None:
        first, self._step, self._phase = self._step is None, event, ""
        if (step_s := event.get("step_s")) is not None:
            self._recent.append(step_s)
        last = event["step"] == event["train_steps"]
        if self._in_place:
            self.tick()
        elif first or last or event["step"] % self._interval == 0:
            self._write(f"{format_event(event)}{self._eta('  ')}\n")
            self._unsaid = None
        else:
            self._unsaid = event

    def _line(self, width: int) -> str:
        """The progress line; on a narrow terminal the bar goes first, then the last parts."""
        phase = ""
        if self._phase:
            seconds = time.monotonic() - self._phase_since
            phase = self._phase + (f" {_duration(seconds)}" if seconds >= 1 else "")
        if self._step is None:
            return phase[:width]
        head, *rest = step_parts(self._step)
        parts = [head, *rest[:2]]
        last = [phase or self._eta()] if phase or self._eta() else []
        bar = self._bar()
        if len("  ".join([bar, *parts, *last])) <= width:
            parts.insert(0, bar)
        for extra in rest[2:]:
            if len("  ".join([*parts, extra, *last])) <= width:
                parts.append(extra)
        return "  ".join([*parts, *last])[:width]

    def _bar(self) -> str:
        assert self._step is not None
        done = round(_BAR * self._step["step"] / self._step["train_steps"])
        return self._full * done + self._empty * (_BAR - done)

    def _eta(self, before: str = "") -> str:
        """Time left by the median of the recent steps: one slow step does not move it."""
        if self._step is None or len(self._recent) < 2:
            return ""
        left = self._step["train_steps"] - self._step["step"]
        return f"{before}{_duration(left * statistics.median(self._recent))} left" if left else ""

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80

    def _write(self, text: str) -> None:
        """A reader that went away (a closed terminal, `| head`) does not end the training."""
        if self._gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._gone = True


def summary(
    result: Mapping[str, Any],
    run_dir: Path,
    overrides: Iterable[str],
    *,
    notes: Iterable[str] = (),
    device: str = "gpu",
    unit: str = "nats a token",
    program: str = "python launch/train.py",
) -> str:
    """What is said at the end.

    result: of result.json. overrides: the words of this start's command line.
    notes: further sentences, each its own line. device: "gpu" or "cpu".
    """
    status = result.get("status", "failed")
    took = f" in {_duration(result['seconds'])}" if result.get("seconds") is not None else ""
    steps = "before the first step" if result.get("steps") is None else f"{result['steps']:,} steps"
    if (result.get("first_step") or 1) > 1:
        steps += f", {result['steps'] - result['first_step'] + 1:,} of them now,"
    rows = [(status, steps + took)]
    for key, label in (
        ("final_loss", "training loss"),
        ("validation_loss", "validation loss"),
        ("test_loss", "test loss"),
    ):
        if result.get(key) is not None:
            rows.append((label, f"{number(result[key])} {unit}"))
    if (rate := result.get("median_tokens_per_s_per_gpu")) is not None:
        rows.append(("speed", throughput(rate, device) + " (median)"))
    if (memory := result.get("peak_memory_gib")) is not None:
        rows.append(("peak memory", f"{memory:.1f} GiB" + (" per GPU" if device == "gpu" else "")))
    if (run_dir / "loss.png").exists():
        rows.append(("loss curve", str(run_dir / "loss.png")))
    if (run_dir / "metrics.jsonl").exists():
        rows.append(("metrics", str(run_dir / "metrics.jsonl")))
    if result.get("checkpoint"):
        rows.append(("checkpoint", str(result["checkpoint"])))
        more = {"training.train_steps": 2 * result["steps"]} if status == "done" else {}
        command = resume_command(overrides, run_dir, more, program)
        rows.append(("train further" if more else "resume", command))
    width = max(len(label) for label, _ in rows)
    return "\n".join([*(f"{label:<{width}}  {text}" for label, text in rows), *notes])


def resume_command(
    overrides: Iterable[str],
    run_dir: Path,
    changes: Mapping[str, Any] | None = None,
    program: str = "python launch/train.py",
) -> str:
    """The command that continues the run in `run_dir`, with `changes` to its settings."""
    new = {**(changes or {}), "run_dir": run_dir}
    dropped = {"resume", *new}
    kept = [word for word in overrides if word.lstrip("+").partition("=")[0] not in dropped]
    return f"{program} {shlex.join([*kept, *(f'{key}={value}' for key, value in new.items())])}"


def _duration(seconds: float) -> str:
    """As 12 s, 3:20 (minutes and seconds) or 2:03:20 (hours)."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
