"""layout=auto: the fastest legal layout that fits.

Every combination of sharding, tensor, pipeline, virtual pipeline, context and expert parallelism,
micro batch size, recompute and CUDA graph is estimated (planning/memory.py, throughput.py). What a
person has set stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planning import memory, rules, saving, throughput
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
OF_SHAPES = {"quantised-shapes"}  # rules that a larger micro batch may meet
Split = tuple[object, ...]


def split_of(facts: Facts) -> Split:
    """What makes it another way to use the GPUs."""
    return (facts.tp, facts.pp, facts.cp, facts.ep, facts.layout.sharding)


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
    def split(self) -> Split:
        return split_of(self.facts)


@dataclass(frozen=True)
class Search:
    """`best`: the fastest of each split, fastest first; the first is the choice. `too_large`:
    splits that do not fit even with all recomputed, or whose saves do not fit in a node's host
    memory, the nearest first. Of splits that can be no faster than the five best neither is known.
    """

    best: list[Option]
    too_large: list[Option]
    tried: int


def wrong(facts: Facts) -> set[str]:
    """The rules that it breaks, whatever this machine has."""
    return {finding.id for finding in errors(rules.check(facts)) if not finding.machine}


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
    if "precision-format" in wrong(searched.base):  # no such format to estimate
        return None
    if searched.option(searched.base) is None:
        return None
    for split in searched.splits():
        searched.try_split(split)
    if not searched.best and not searched.too_large:
        return None
    fastest = sorted(searched.best.values(), key=lambda option: option.speed.step_s)
    nearest: dict[Split, Option] = {}
    for option in sorted(searched.too_large, key=lambda option: option.memory.needed):
        if option.split not in searched.best:  # another number of virtual stages may fit
            nearest.setdefault(option.split, option)
    return Search(fastest, list(nearest.values()), searched.tried)


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
        self.best: dict[Split, Option] = {}
        self.too_large: list[Option] = []
        self.tried = 0

    def facts(self, config: RunConfig) -> Facts:
        return Facts(config, config.layout, self.blocks)

    def held(self, facts: Facts) -> memory.Estimate | None:
        self.tried += 1
        return memory.estimate(facts)

    def option(self, facts: Facts, held: memory.Estimate | None = None) -> Option | None:
        held = held or self.held(facts)
        speed = throughput.estimate(facts.config, facts) if held is not None else None
        return Option(facts, held, speed) if held is not None and speed is not None else None

    def fitting(self, facts: Facts) -> memory.Estimate | None:
        """The estimate, where it fits."""
        held = self.held(facts)
        fits = held is not None and (self.room is None or held.needed <= self.room)
        return held if fits else None

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
                            for sharding in self._shardings(pp, world // (tp * pp)):
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

    def _shardings(self, pp: int, ranks: int) -> list[str]:
        """ranks: over which states can be sharded."""
        if self.layout.sharding is not None:
            return [self.layout.sharding]
        whole = "optimizer" if self.config.training.optimizer.name == "adam" else "none"
        return [whole, "fsdp"] if ranks > 1 and pp == 1 else [whole]

    def try_split(self, split: dict[str, Any]) -> None:
        """Keep the split's fastest option: of the micro batches that fit, each with as little
        recompute as it needs."""
        training = self.config.training
        chosen = training.micro_batch_size
        sizes = [chosen] if chosen else [2**n for n in range(LARGEST_MICRO_BATCH.bit_length())]
        needed: dict[str, Any] = {"recompute": "none"}  # a larger micro batch needs no less
        for size in sizes:
            base = _with(self.config, size, **split, **_open(self.layout, cuda_graph="none"))
            if training.global_batch_size % (size * self.facts(base).data_parallel):
                return
            facts = self.facts(_with(base, **_open(self.layout, recompute="none")))
            if broken := wrong(facts):
                if broken <= OF_SHAPES:
                    continue  # a larger one may be legal
                return
            if not self._may_win(base, needed, self._to_beat(split_of(facts))):
                continue
            found = self._least_recompute(facts, needed.get("recompute_layers") or 1)
            if found and not saving.fits(facts):  # whatever the micro batch and the recompute
                self.too_large += found
                return
            if not found:
                full = self.facts(_with(base, **_open(self.layout, recompute="full")))
                if option := self.option(full):
                    self.too_large.append(option)
                return
            for option in map(self._graph, found):
                best = self.best.get(option.split)
                if best is None or option.speed.step_s < best.speed.step_s:
                    self.best[option.split] = option
            layout = found[-1].config.layout
            if layout.recompute == "full" and len(found) == 1:
                needed = {"recompute": "full", "recompute_layers": layout.recompute_layers}

    def _to_beat(self, split: Split) -> float:
        """Seconds a step of what is already found: of the same split, or of as many others as are
        shown."""
        others = sorted(o.speed.step_s for other, o in self.best.items() if other != split)
        own = [self.best[split].speed.step_s] if split in self.best else []
        return min([*own, *others[SHOWN - 1 : SHOWN]], default=math.inf)

    def _may_win(self, base: RunConfig, needed: dict[str, Any], step_s: float) -> bool:
        """Whether it can take less than `step_s`, with the recompute that it needs at least and
        without launch gaps, as under a CUDA graph."""
        if step_s == math.inf:
            return True
        open_ = _open(self.layout, recompute=needed["recompute"])
        if open_ and "recompute_layers" in needed:
            open_["recompute_layers"] = needed["recompute_layers"]
        facts = self.facts(_with(base, **open_))
        speed = throughput.estimate(facts.config, facts)
        if speed is None:
            return False
        return speed.step_s - speed.parts.get(throughput.GAPS, 0.0) < step_s

    def _least_recompute(self, facts: Facts, low: int) -> list[Option]:
        """What fits with the least computed again: nothing; or the MLPs, and the fewest blocks
        (at least `low` of a stage), whichever is faster. Empty: nothing fits."""
        if held := self.fitting(facts):
            return self._options([(facts, held)])
        if self.layout.recompute is not None:
            return []
        found = []
        mlp = self.facts(_with(facts.config, recompute="selective", recompute_modules=["mlp"]))
        if not wrong(mlp) and (held := self.fitting(mlp)):
            found.append((mlp, held))

        def recomputing(number: int | None) -> tuple[Facts, memory.Estimate | None]:
            some = self.facts(_with(facts.config, recompute="full", recompute_layers=number))
            return some, self.fitting(some)

        blocks = facts.num_blocks // (facts.pp * facts.vpp)  # of a stage
        every, held = recomputing(None)
        if held is None or wrong(every):
            return self._options(found)
        fits, high = (every, held), blocks
        while low < high:
            middle = (low + high) // 2
            some, held = recomputing(middle)
            if held is None:
                low = middle + 1
            else:
                fits, high = (some, held), middle
        return self._options([*found, fits])

    def _options(self, found: list[tuple[Facts, memory.Estimate]]) -> list[Option]:
        options = [self.option(facts, held) for facts, held in found]
        return [option for option in options if option is not None]

    def _graph(self, option: Option) -> Option:
        gaps = option.speed.parts.get(throughput.GAPS, 0.0)
        without = option.speed.step_s - gaps
        # Graphs that ran are of data parallel layouts (NVIDIA's for Llama 3 8B; here one H200).
        f = option.facts
        if self.layout.cuda_graph is not None or f.tp * f.pp * f.cp * f.ep > 1:
            return option
        if option.speed.step_s < GRAPH_GAIN * without:
            return option
        facts = self.facts(_with(option.config, cuda_graph="full"))
        held = self.fitting(facts) if not wrong(facts) else None
        graph = self.option(facts, held) if held else None
        if graph is None or option.speed.step_s / graph.speed.step_s < GRAPH_GAIN:
            return option
        return graph


def _degrees(given: int | None, most: int, allowed: Any) -> list[int]:
    if given is not None:
        return [given]
    return [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most and allowed(n)]


def why_slower(option: Option, best: Option) -> str:
    """'12% slower: tensor parallel +10% of a step'."""
    extra = {part: s - best.speed.parts.get(part, 0.0) for part, s in option.speed.parts.items()}
    part = max(extra, key=lambda name: extra[name])
    slower = option.speed.step_s / best.speed.step_s - 1
    if slower < 0.005:
        return "as fast"
    return f"{slower:.0%} slower: {part} +{extra[part] / best.speed.step_s:.0%} of a step"
