"""What would make a choice fit that does not, and what it costs in speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from planning import memory, saving, throughput
from planning.hardware import GIB
from planning.rules import Facts
from planning.schema import RunConfig
from planning.search import MARGIN, wrong


@dataclass(frozen=True)
class Change:
    """Settings that make a choice fit, and the step's time against that before (1.1: 10% more)."""

    settings: str
    step: float
    kind: str  # the settings without their values

    def __str__(self) -> str:
        more = (
            f"{self.step - 1:.0%} slower" if self.step >= 1 else f"{1 / self.step - 1:.0%} faster"
        )
        of = " a GPU" if "hardware.nodes" in self.kind else ""
        return f"{self.settings} ({more}{of})"


def that_fit(facts: Facts, most: int = 3) -> list[Change]:
    """The settings that make a choice fit which does not: of each kind the fastest, and of these
    the fastest first; then two kinds together, where single ones are too few."""
    before = throughput.estimate(facts.config, facts)
    capacity = memory.capacity_gib(facts)
    if before is None or capacity is None:
        return []
    single = list(_single(facts.config))
    found = _fitting(facts, single, before.step_s)
    if len(kinds := _fastest(found)) < most:
        fit = {change.kind for change in found}
        rest = [change for change in single if _kind(change) not in fit]
        pairs = (
            {**first, **second}
            for index, first in enumerate(rest)
            for second in rest[index + 1 :]
            if not first.keys() & second.keys()
        )
        kinds += _fastest(_fitting(facts, pairs, before.step_s))
    return kinds[:most]


def _fastest(found: list[Change]) -> list[Change]:
    """Of each kind, the fastest first."""
    kinds: dict[str, Change] = {}
    for change in sorted(found, key=lambda change: change.step):
        kinds.setdefault(change.kind, change)
    return list(kinds.values())


def _single(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Changes of one thing, as settings."""
    layout, training, precision = config.layout, config.training, config.precision
    stages = (layout.pipeline_parallel or 1) * (layout.virtual_pipeline_parallel or 1)
    blocks = config.model.num_layers // stages  # of a stage
    full: dict[str, Any] = {"layout.recompute": "full"}
    if layout.recompute == "selective":
        full["layout.recompute_modules"] = ["core_attn"]  # what stands where it means nothing
    if layout.recompute != "full" or layout.recompute_layers is not None:
        has = layout.recompute_layers or 0
        yield full | {"layout.recompute_layers": None}
        for number in sorted({blocks // 4, blocks // 2, 3 * blocks // 4}):
            if number > has:
                yield full | {"layout.recompute_layers": number}
    size = training.micro_batch_size or 1
    while size > 1:
        size //= 2
        yield {"training.micro_batch_size": size}
    if layout.sharding in ("none", "optimizer"):
        graph = {"layout.cuda_graph": "none"} if layout.cuda_graph == "full" else {}
        yield {"layout.sharding": "fsdp", "layout.overlap": True} | graph
    if layout.sharding == "none" and training.optimizer.name == "adam":
        yield {"layout.sharding": "optimizer"}
    for degree in (2, 4, 8):
        if degree > (layout.tensor_parallel or 1):
            yield {"layout.tensor_parallel": degree, "layout.sequence_parallel": True}
        if degree > (layout.pipeline_parallel or 1):
            yield {"layout.pipeline_parallel": degree}
    if precision.optimizer_moments == "fp32":
        yield {"precision.optimizer_moments": "bf16"}
    if precision.gradients == "fp32" and precision.dtype == "bf16":
        yield {"precision.gradients": "bf16"}
    if precision.format != "none" and not precision.param_gather:
        yield {"precision.param_gather": True}
    for more in (2, 4, 8, 16, 32):
        yield {"hardware.nodes": more * config.hardware.nodes}


def _fitting(facts: Facts, settings: Iterable[dict[str, Any]], before: float) -> list[Change]:
    found = []
    for change in settings:
        config = facts.config
        for name, value in change.items():
            group, _, setting = name.partition(".")
            part = getattr(config, group).model_copy(update={setting: value})
            config = config.model_copy(update={group: part})
        changed = replace(facts, config=config, layout=config.layout)
        if wrong(changed):
            continue
        held, capacity = memory.estimate(changed), memory.capacity_gib(changed)
        if held is None or capacity is None or held.needed > capacity * GIB * (1 - MARGIN):
            continue
        if not saving.fits(changed):
            continue
        speed = throughput.estimate(config, changed)
        if speed is not None:
            said = [
                setting_word(*setting) for setting in change.items() if _differs(facts, *setting)
            ]
            # More nodes: what counts is the time of the same work on the same GPUs.
            step = speed.step_s * changed.world_size / facts.world_size
            found.append(Change(" ".join(said), step / before, _kind(change)))
    return found


def _kind(change: dict[str, Any]) -> str:
    return " ".join(sorted(name for name in change if not name.startswith("layout.recompute_")))


def _differs(facts: Facts, name: str, value: Any) -> bool:
    group, _, setting = name.partition(".")
    return bool(getattr(getattr(facts.config, group), setting) != value)


def setting_word(name: str, value: Any) -> str:
    """A setting as a command line takes it."""
    if isinstance(value, list):
        value = f"[{','.join(value)}]"
    words = {True: "true", False: "false", None: "null"}
    return f"{name}={words[value] if value is None or isinstance(value, bool) else value}"
