"""What the workers tell whoever watches: `logs/events.jsonl`, one JSON object a line.

Events, by their key "event":
  phase       text                          what is being done now ("importing Megatron")
  ready                                     every rank's stop handler is in place: from here on
                                            SIGTERM means "finish the step and save"; written
                                            after a barrier. Before it a stop ends all at once.
  step        a line of metrics.jsonl, train_steps, optionally device ("cpu" or "gpu")
  validation  step, and validation_loss or test_loss
  checkpoint  step, path, seconds
  notice      text                          worth a line that stays
  warning     text
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
# Events after which a worker certainly handles SIGTERM.
READY = frozenset({"ready", "step", "validation", "checkpoint"})


class EventLog:
    """Appends events to a file; several processes may write to one.

    The file is made with the first event, so that a node that tells nothing leaves none.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, -1

    def write(self, event: str, **fields: Any) -> None:
        """One write per line, so that lines of two writers do not mix."""
        if self._fd < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)
        os.write(self._fd, (json.dumps({"event": event, **fields}) + "\n").encode())


class EventReader:
    """Reads what has been appended since the last read, from the file's end at construction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """The new whole lines as events; a line that is not an event is passed over."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        events = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                events.append(event)
        return events


def format_event(event: Event) -> str:
    """One event as one line of plain text; "" where there is nothing to say to a person."""
    match event["event"]:
        case "step":
            return "  ".join(step_parts(event))
        case "validation":
            kind = "validation" if "validation_loss" in event else "test"
            return f"step {event['step']}: {kind} loss {number(event.get(f'{kind}_loss'))}"
        case "checkpoint":
            return f"step {event['step']}: saved {event['path']} in {event['seconds']:.1f} s"
        case "phase" | "notice":
            return str(event["text"])
        case "warning":
            return f"warning: {event['text']}"
    return ""


# What a job's log says of a step, and how CloudWatch reads it back: (name, as printed).
_LOGGED = (
    ("loss", ".6g"),
    ("tokens_per_s_per_gpu", ".1f"),
    ("mfu", ".4f"),
    ("memory_gib", ".2f"),
    ("validation_loss", ".6g"),
    ("test_loss", ".6g"),
)
# Name -> regular expression with the value as its group; `\b` keeps loss from validation_loss.
LOG_METRICS = {name: rf"\b{name}=([-+.0-9e]+)" for name, _ in _LOGGED}


def log_line(event: Event) -> str:
    """A step or a validation as one line for programs that read logs; "" for other events.

    `step=7 loss=2.04 tokens_per_s_per_gpu=17835.2 mfu=0.4120 memory_gib=71.30`: what was not
    measured is left out, a loss that is not finite is "nan". LOG_METRICS finds the values.
    """
    if event["event"] not in ("step", "validation"):
        return ""
    parts = [f"step={event['step']}"]
    for name, form in _LOGGED:
        if (value := event.get(name)) is not None:
            parts.append(f"{name}={value:{form}}")
        elif name == "loss" and name in event:
            parts.append("loss=nan")  # JSON's null: not finite
    return " ".join(parts)


def read_log_line(line: str) -> dict[str, Any] | None:
    """The event of a line that log_line made, with what the line says of it; else None."""
    found = re.match(r"step=(\d+) ", line)
    if found is None:
        return None
    values: dict[str, Any] = {
        name: float(value[1])
        for name, regex in LOG_METRICS.items()
        if (value := re.search(regex, line))
    }
    if "loss=nan" in line:
        values["loss"] = None
    kind = "validation" if {"validation_loss", "test_loss"} & values.keys() else "step"
    return {"event": kind, "step": int(found[1]), **values}


def step_parts(event: Event) -> list[str]:
    """The parts of a step's line, the most important first; what was not measured is left out."""
    parts = [f"step {event['step']}/{event['train_steps']}", f"loss {number(event['loss'])}"]
    if (rate := event.get("tokens_per_s_per_gpu")) is not None:
        parts.append(throughput(rate, event.get("device", "gpu")))
    if (step_s := event.get("step_s")) is not None:
        parts.append(f"{step_s:.3g} s/step")
    if (mfu := event.get("mfu")) is not None:
        parts.append(f"MFU {100 * mfu:.1f}%")
    if (memory := event.get("memory_gib")) is not None:
        parts.append(f"{memory:.1f} GiB")
    if (norm := event.get("grad_norm")) is not None:
        parts.append(f"gradient norm {norm:.3g}")
    if (rate := event.get("lr")) is not None:
        parts.append(f"learning rate {rate:.2e}")
    return parts


def throughput(tokens_per_s: float, device: str = "gpu") -> str:
    """Tokens per second of one GPU, or of one process where there is none."""
    return f"{tokens_per_s:,.0f} tokens/s/{'GPU' if device == 'gpu' else 'process'}"


def number(loss: float | None) -> str:
    """A loss in nats; JSON's null stands for a value that is not finite."""
    return "not finite" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"
