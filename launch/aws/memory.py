"""A run that was out of memory: what the plan had said, what was measured, what would fit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from planning import changes, memory
from planning.hardware import GIB
from planning.plan import load
from planning.rules.base import Facts
from training.events import read_log_line

# torch's words (torch.OutOfMemoryError, 2.11): "Tried to allocate 20.00 MiB. GPU 0 has a total
# capacity of 139.80 GiB of which 12.38 MiB is free. ... this process has 139.20 GiB memory in use."
_TRIED = re.compile(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB)")
_CAPACITY = re.compile(r"total capacity of ([\d.]+) GiB")
_IN_USE = re.compile(r"this process has ([\d.]+) (MiB|GiB) memory in use", re.IGNORECASE)
# What saves memory where the planner has no estimate, the cheapest in speed first.
GENERAL = (
    "training.micro_batch_size lower, or layout.recompute=selective, then full",
    "layout.sharding=optimizer, then fsdp: states over the data-parallel GPUs",
    "layout.tensor_parallel, pipeline_parallel or hardware.nodes higher",
)
_GIB = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


def measured(texts: Iterable[str]) -> dict[str, float]:
    """GiB of the failing rank's GPU: in_use, tried, capacity; logged: the last step's peak."""
    found: dict[str, float] = {}
    for text in texts:
        event = read_log_line(text)
        if event and event.get("memory_gib") is not None:
            found["logged"] = event["memory_gib"]
        if "in_use" not in found and (use := _IN_USE.search(text)):
            found["in_use"] = float(use[1]) * _GIB[use[2]]
        if "tried" not in found and (tried := _TRIED.search(text)):
            found["tried"] = float(tried[1]) * _GIB[tried[2]]
        if "capacity" not in found and (capacity := _CAPACITY.search(text)):
            found["capacity"] = float(capacity[1])
    return found


def lines(run_dir: Path, texts: Iterable[str]) -> list[str]:
    """The comparison, for a person."""
    have, planned = measured(texts), _plan_json(run_dir).get("memory", {})
    said = []
    parts, needed = planned.get("parts", {}), planned.get("needed_gib")
    if needed is not None:
        said.append(f"{'planned':<10} {needed:.1f} GiB of one GPU{_parts(parts)}")
    elif parts:
        total = sum(v for v in parts.values() if v is not None)
        said.append(f"{'planned':<10} {total:.1f} GiB without activations{_parts(parts)}")
    used = have.get("in_use", have.get("logged"))
    if used is not None:
        tried = f", and {have['tried']:.2f} GiB more were asked for" if "tried" in have else ""
        capacity = have.get("capacity", planned.get("capacity_gib"))
        room = f" of {capacity:.1f} GiB" if capacity else ""
        said.append(f"{'measured':<10} {used:.1f} GiB in use{room}{tried}")
    wanted = None if used is None else used + have.get("tried", 0.0)
    return said + [f"{'would help':<10} {way}" for way in ways(run_dir, wanted) or GENERAL]


def _parts(parts: dict[str, Any]) -> str:
    shown = sorted(((n, v) for n, v in parts.items() if v), key=lambda part: -part[1])[:4]
    named = ", ".join(f"{name} {value:.1f}" for name, value in shown)
    return f" ({named})" if named else ""


def ways(run_dir: Path, wanted: float | None) -> list[str]:
    """Settings with which the run fits, the fastest first, by the planner's estimate; [] where it
    has none. wanted: GiB that the run would have needed: what the estimate missed of it, it is
    taken to miss again."""
    try:
        config = load(run_dir / "plan.yaml").config
    except (OSError, ValueError):
        return []
    facts = Facts.of(config)
    held, room = memory.estimate(facts), memory.capacity_gib(facts)
    if held is None or room is None:
        return []
    if wanted is not None:
        room *= min(held.needed / GIB / wanted, 1.0)
    hardware = config.hardware.model_copy(update={"memory_gib": room})
    smaller = config.model_copy(update={"hardware": hardware})
    return [str(change) for change in changes.that_fit(replace(facts, config=smaller))]


def _plan_json(run_dir: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run_dir / "plan.json").read_text()))
    except (OSError, ValueError):
        return {}
