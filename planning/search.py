"""layout=auto: the fastest legal layout that fits; and what would make one fit that does not.

Every combination of sharding, tensor, pipeline, virtual pipeline, context and expert parallelism,
micro batch size, recompute and CUDA graph is estimated (planning/memory.py, throughput.py). What a
person has set stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from planning import memory, rules, throughput
from planning.findings import errors
from planning.hardware import GIB
from planning.rules import Facts
from planning.schema import LayoutConfig, RunConfig

MARGIN = 0.05  # of the card that the search leaves free: estimates err, and allocators fragment
LONG = 16_384  # tokens of a sequence from which context parallelism is tried
LARGEST_MICRO_BATCH = 64
# A graph is taken where it gains this much: it costs start-up time and some memory.
GRAPH_GAIN = 1.02
SHOWN = 5


@dataclass(frozen=True)
class Option:
    """A complete choice with its estimates. Seconds and bytes."""

    facts: Facts
    memory: memory.Estimate
    speed: throughput.Estimate

    @property
    def config(self) -> RunConfig:
        return self.facts.config

    @property
    def split(self) -> tuple[object, ...]:
        """What makes it another way to use the GPUs."""
        layout = self.facts.layout
        return (self.facts.tp, self.facts.pp, self.facts.cp, self.facts.ep, layout.sharding)


@dataclass(frozen=True)
class Search:
    """`best`: the fastest of each split, fastest first; the first is the choice. `too_large`:
    splits that do not fit even with all recomputed, the nearest first."""

    best: list[Option]
    too_large: list[Option]
    tried: int


@dataclass(frozen=True)
class Change:
    """Settings that make a choice fit, and the step's time against that before (1.1: 10% more)."""

    settings: str
    step: float

    def __str__(self) -> str:
        more = (
            f"{self.step - 1:.0%} slower" if self.step >= 1 else f"{1 / self.step - 1:.0%} faster"
        )
        return f"{self.settings} ({more})"


def complete(config: RunConfig) -> bool:
    """Nothing is left to choose."""
    values = config.layout.model_dump(exclude={"recompute_layers"}).values()
    return None not in values and config.training.micro_batch_size is not None


def plain(config: RunConfig) -> RunConfig:
    """The choice with what is open set to the simplest: data parallel, nothing recomputed."""
    layout = config.layout
    sharding = "optimizer" if config.training.optimizer.name == "adam" else "none"
    return _with(
        config,
        micro_batch_size=config.training.micro_batch_size or 1,
        **_open(
            layout,
            tensor_parallel=1,
            pipeline_parallel=1,
            virtual_pipeline_parallel=1,
            context_parallel=1,
            expert_parallel=1,
            sequence_parallel=(layout.tensor_parallel or 1) > 1,
            sharding=sharding,
            overlap=layout.sharding != "fsdp2",  # it overlaps by itself
            recompute="none",
            cuda_graph="none",
        ),
    )


def run(config: RunConfig, blocks: list[str]) -> Search | None:
    """None: nothing is open, or nothing is legal or estimated on this hardware or model."""
    if complete(config):
        return None
    searched = _Searched(config, blocks)
    for split in searched.splits():
        searched.try_split(split)
    if not searched.options and not searched.too_large:
        return None
    fastest: dict[tuple[object, ...], Option] = {}
    for option in sorted(searched.options, key=lambda option: option.speed.step_s):
        fastest.setdefault(option.split, option)
    nearest = sorted(searched.too_large, key=lambda option: option.memory.needed)
    return Search(list(fastest.values()), nearest, searched.tried)


def _open(layout: LayoutConfig, **values: Any) -> dict[str, Any]:
    """Those of `values` that the layout leaves open."""
    return {name: value for name, value in values.items() if getattr(layout, name) is None}


def _with(config: RunConfig, micro_batch_size: int | None = None, **values: Any) -> RunConfig:
    update: dict[str, Any] = {"layout": config.layout.model_copy(update=values)}
    if micro_batch_size is not None:
        update["training"] = config.training.model_copy(
            update={"micro_batch_size": micro_batch_size}
        )
    return config.model_copy(update=update)


class _Searched:
    def __init__(self, config: RunConfig, blocks: list[str]) -> None:
        self.config, self.blocks, self.layout = config, blocks, config.layout
        self.base = self.facts(plain(config))
        capacity = memory.capacity_gib(self.base)
        self.room = None if capacity is None else capacity * GIB * (1 - MARGIN)
        self.options: list[Option] = []
        self.too_large: list[Option] = []
        self.tried = 0

    def facts(self, config: RunConfig) -> Facts:
        return Facts(config, config.layout, self.blocks)

    def legal(self, facts: Facts) -> bool:
        return not any(not finding.machine for finding in errors(rules.check(facts)))

    def option(self, facts: Facts) -> Option | None:
        self.tried += 1
        held = memory.estimate(facts)
        speed = throughput.estimate(facts.config, facts) if held is not None else None
        return Option(facts, held, speed) if held is not None and speed is not None else None

    def fits(self, facts: Facts) -> bool:
        self.tried += 1
        held = memory.estimate(facts)
        return held is not None and (self.room is None or held.needed <= self.room)

    def splits(self) -> Iterator[dict[str, Any]]:
        """Ways to use the GPUs, by what they set of the layout."""
        model, world = self.config.model, self.base.world_size
        near = self.base.gpu.nvlink_domain or self.config.hardware.gpus_per_node or 1
        layout = self.layout
        long = model.seq_length >= LONG
        for tp in _degrees(layout.tensor_parallel, 8, lambda n: n <= near):
            for pp in _degrees(layout.pipeline_parallel, 16, lambda n: n <= len(self.blocks)):
                for cp in _degrees(layout.context_parallel, 8, lambda n: n == 1 or long):
                    if world % (tp * pp * cp):
                        continue
                    for ep in _degrees(
                        layout.expert_parallel, 64, lambda n: (model.num_experts or 1) % n == 0
                    ):
                        for vpp in self._virtual(pp):
                            for sharding in self._shardings(pp):
                                yield {
                                    "tensor_parallel": tp,
                                    "pipeline_parallel": pp,
                                    "context_parallel": cp,
                                    "expert_parallel": ep,
                                    "virtual_pipeline_parallel": vpp,
                                    "sharding": sharding,
                                } | _open(
                                    layout,
                                    sequence_parallel=tp > 1,
                                    overlap=sharding != "fsdp2",
                                )

    def _virtual(self, pp: int) -> list[int]:
        if self.layout.virtual_pipeline_parallel is not None:
            return [self.layout.virtual_pipeline_parallel]
        even = [n for n in (2, 4, 8) if len(self.blocks) % (pp * n) == 0]
        return [1, *even] if pp > 1 else [1]

    def _shardings(self, pp: int) -> list[str]:
        if self.layout.sharding is not None:
            return [self.layout.sharding]
        whole = "optimizer" if self.config.training.optimizer.name == "adam" else "none"
        return [whole, "fsdp"] if self.base.world_size > 1 and pp == 1 else [whole]

    def try_split(self, split: dict[str, Any]) -> None:
        """Add the split's options: the largest micro batches that fit, with as little recompute as
        they need."""
        training = self.config.training
        chosen = training.micro_batch_size
        sizes = [chosen] if chosen else [2**n for n in range(LARGEST_MICRO_BATCH.bit_length())]
        added = False
        for size in sizes:
            base = _with(
                self.config,
                size,
                **split,
                **_open(self.layout, recompute="none", cuda_graph="none"),
            )
            facts = self.facts(base)
            if training.global_batch_size % (size * facts.data_parallel) or not self.legal(facts):
                break
            fitting = self._recompute(facts)
            if fitting is None:
                if not added:
                    full = _with(base, **_open(self.layout, recompute="full"))
                    if option := self.option(self.facts(full)):
                        self.too_large.append(option)
                break
            option = self.option(fitting)
            if option is None:
                break
            added = True
            self.options.append(self._graph(option))

    def _recompute(self, facts: Facts) -> Facts | None:
        """The facts with as few blocks recomputed as fit; None: even all are too few."""
        if self.fits(facts):
            return facts
        if self.layout.recompute is not None:
            return None

        def recomputing(number: int | None) -> Facts:
            return self.facts(_with(facts.config, recompute="full", recompute_layers=number))

        every = recomputing(None)
        if not self.legal(every) or not self.fits(every):
            return None
        low, high = 1, facts.num_blocks // (facts.pp * facts.vpp)  # `high` blocks fit, or all
        while low < high:
            middle = (low + high) // 2
            if self.fits(recomputing(middle)):
                high = middle
            else:
                low = middle + 1
        part = recomputing(low)
        # All blocks as whole units keep less than all their layers do.
        return part if low < facts.num_blocks // (facts.pp * facts.vpp) else every

    def _graph(self, option: Option) -> Option:
        if self.layout.cuda_graph is not None or option.facts.pp > 1:
            return option
        facts = self.facts(_with(option.config, cuda_graph="full"))
        if not self.legal(facts) or not self.fits(facts):
            return option
        graph = self.option(facts)
        if graph is None or option.speed.step_s / graph.speed.step_s < GRAPH_GAIN:
            return option
        return graph


def _degrees(given: int | None, most: int, allowed: Any) -> list[int]:
    if given is not None:
        return [given]
    return [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most and allowed(n)]


def why_slower(option: Option, best: Option) -> str:
    """'12% slower: tensor parallel 210 ms more'."""
    extra = {part: s - best.speed.parts.get(part, 0.0) for part, s in option.speed.parts.items()}
    part = max(extra, key=lambda name: extra[name])
    slower = option.speed.step_s / best.speed.step_s - 1
    return f"{slower:.0%} slower: {part} +{extra[part] / best.speed.step_s:.0%} of a step"


# --- what would make it fit --------------------------------------------------------------------


def changes(facts: Facts, most: int = 3) -> list[Change]:
    """The settings that make a choice fit which does not, the fastest first: one each, or two
    where no single one is enough."""
    before = throughput.estimate(facts.config, facts)
    capacity = memory.capacity_gib(facts)
    if before is None or capacity is None:
        return []
    single = list(_single(facts.config))
    found = _fitting(facts, single, before.step_s)
    if not found:
        pairs = (
            {**first, **second}
            for index, first in enumerate(single)
            for second in single[index + 1 :]
            if not first.keys() & second.keys()
        )
        found = _fitting(facts, pairs, before.step_s)
    return sorted(found, key=lambda change: change.step)[:most]


def _single(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Changes of one thing, as settings."""
    layout, training, precision = config.layout, config.training, config.precision
    if layout.recompute != "full":
        yield {"layout.recompute": "full"}
        yield {"layout.recompute": "full", "layout.recompute_layers": config.model.num_layers // 2}
    size = training.micro_batch_size or 1
    while size > 1:
        size //= 2
        yield {"training.micro_batch_size": size}
    if layout.sharding in ("none", "optimizer"):
        yield {"layout.sharding": "fsdp", "layout.overlap": True}
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
    for more in (2, 4):
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
        if any(not finding.machine for finding in errors(rules.check(changed))):
            continue
        held, capacity = memory.estimate(changed), memory.capacity_gib(changed)
        if held is None or capacity is None or held.needed > capacity * GIB * (1 - MARGIN):
            continue
        speed = throughput.estimate(config, changed)
        if speed is not None:
            said = " ".join(f"{name}={_said(value)}" for name, value in change.items())
            # More nodes: what counts is the time of the same work on the same GPUs.
            step = speed.step_s * changed.world_size / facts.world_size
            found.append(Change(said, step / before))
    return found


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
