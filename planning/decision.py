"""The whole decision for a model on some hardware: precision, batch, sequence, recompute, split.

Every alternative is a complete choice with its estimates; nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planning import memory, rules, saving, search, throughput
from planning.advice import WORTH
from planning.findings import Finding, errors
from planning.hardware import GIB
from planning.pattern import blocks
from planning.resolve import Resolution, completed, resolve
from planning.rules import Facts
from planning.schema import RunConfig
from planning.search import Search

BASELINE = "bf16"
# Up to about 14 B parameters FP8 with one scale a tensor has the least overhead; above, MXFP8 is
# the stable choice, and NVFP4 is for the largest.
SMALL, LARGE = 14.5e9, 30e9
FASTER = 1.05  # of two formats of 8 bits the faster one is taken from here


@dataclass(frozen=True)
class Alternative:
    """A complete choice by its `name`: what it takes, how fast it is, what is wrong with it.

    `held` and `speed` are None where it is illegal; `needed` is in bytes.
    """

    name: str
    config: RunConfig
    held: memory.Estimate | None
    speed: throughput.Estimate | None
    findings: tuple[Finding, ...] = ()
    options: Search | None = None  # what was compared, where the layout was open

    @property
    def legal(self) -> bool:
        return self.held is not None and self.speed is not None

    @cached_property
    def facts(self) -> Facts:
        return Facts.of(self.config)

    @property
    def room(self) -> float | None:
        """Bytes of one GPU."""
        capacity = memory.capacity_gib(self.facts)
        return None if capacity is None else capacity * GIB

    @property
    def fits(self) -> bool:
        if self.held is None or not self.saves:
            return False
        return self.room is None or self.held.needed <= self.room

    @property
    def saves(self) -> bool:
        """Whether a node's host memory is enough to save and to resume."""
        return saving.fits(self.facts)

    @property
    def rate(self) -> float:
        """Tokens/s a GPU; 0 where it is illegal."""
        return self.speed.tokens_per_s_per_gpu if self.speed else 0.0


@dataclass(frozen=True)
class Decision:
    """`taken` is one of `precisions`; `why` says what speaks for it; `plan` is what it comes to."""

    precisions: list[Alternative]
    taken: Alternative
    why: list[str]
    plan: Resolution

    @property
    def baseline(self) -> Alternative | None:
        return next((one for one in self.precisions if one.name == BASELINE and one.legal), None)

    def gain(self, one: Alternative) -> float | None:
        """Its speed against that of BF16, each with its own best layout; None: one does not fit."""
        base = self.baseline
        if base is None or not base.fits or not one.fits:
            return None
        return one.rate / base.rate


def decide(choices: Mapping[str, RunConfig], asked: str | None, parameters: int) -> Decision:
    """choices: the run in each precision. asked: the one that a person named, which is kept.

    Where that, or every one, is wrong wherever it runs, the decision's plan has the errors.
    """
    first = asked or next(iter(choices))
    plan = resolve(choices[first])
    known = Alternative(
        first, plan.config, plan.held, plan.speed, tuple(plan.findings), plan.options
    )
    if plan.plan is None or (asked and not known.legal):
        return Decision([known], known, [], plan)
    precisions = [
        known if name == first else estimated(name, config) for name, config in choices.items()
    ]
    able = [one for one in precisions if one.fits]
    best, why = _recommended(able, parameters)
    taken = best
    if asked is not None:
        taken, why = known, [f"{asked} is what was asked for", *why]
        if best is not None and best is not known:
            why.insert(1, f"otherwise it would be {best.name}")
    if taken is None:  # none fits, or is legal: the nearest
        legal = [(one.held.needed, one) for one in precisions if one.held is not None]
        taken = min(legal, key=lambda pair: pair[0])[1] if legal else known
    if taken is not known:
        plan = resolve(taken.config)
    return Decision(precisions, taken, why, plan)


def estimated(name: str, asked: RunConfig) -> Alternative:
    """The choice in its best layout, with the rules that it breaks and its estimates."""
    model_blocks = blocks(asked.model.pattern, asked.model.num_layers)
    config, options = completed(asked, model_blocks)
    facts = Facts(config, config.layout, model_blocks)
    found = rules.check(facts)
    if errors(found):
        return Alternative(name, config, None, None, tuple(found))
    held, speed = memory.estimate(facts), throughput.estimate(config, facts)
    return Alternative(name, config, held, speed, tuple(found), options)


def _recommended(able: list[Alternative], parameters: int) -> tuple[Alternative | None, list[str]]:
    """The precision to take of those that fit, and why."""
    by_name = {one.name: one for one in able}
    base = by_name.get(BASELINE)
    small = parameters < SMALL
    eights = [by_name[name] for name in ("fp8", "mxfp8") if name in by_name]
    if not small:
        eights.reverse()
    if not eights:
        return base, [f"no recommended low precision fits here, so {BASELINE}"] if base else []
    best = eights[0]
    for other in eights[1:]:
        if other.rate > FASTER * best.rate:
            best = other
    if base is not None and best.rate < WORTH * base.rate:
        return base, [
            f"{best.name} is predicted at {best.rate / base.rate:.2f} times BF16: too little to pay"
        ]
    gain = f"{best.rate / base.rate - 1:+.0%} over BF16" if base else "BF16 does not fit"
    if small:
        why = ["up to about 14 B parameters FP8 is the low precision with the least overhead; "
               f"tune the batch before another format; predicted: {gain}"]  # fmt: skip
    else:
        stable = (
            "MXFP8 is the stable choice"
            if best.name == "mxfp8"
            else ("FP8 balances speed and memory")
        )
        why = [f"from about 14 B parameters {stable}; predicted: {gain}"]
    four = by_name.get("nvfp4")
    if four is not None and parameters >= LARGE and four.rate > FASTER * best.rate:
        why.append(
            f"NVFP4, for the largest models, is predicted {four.rate / best.rate - 1:.0%} faster "
            "still: take it once its loss curve has held beside BF16's"
        )
    return best, why


# --- around the choice --------------------------------------------------------------------------


def changed(one: Alternative, name: str, **settings: Any) -> Alternative | None:
    """The same with other settings (`layout__recompute="full"`); None: illegal."""
    config = one.config
    for setting, value in settings.items():
        group, _, field = setting.partition("__")
        part = getattr(config, group).model_copy(update={field: value})
        config = config.model_copy(update={group: part})
    facts = Facts(config, config.layout, one.facts.blocks)
    if any(not finding.machine for finding in errors(rules.check(facts))):
        return None
    held, speed = memory.estimate(facts), throughput.estimate(config, facts)
    return Alternative(name, config, held, speed) if held and speed else None


def micro_batches(one: Alternative) -> list[Alternative]:
    """1, 2, 4, ... in the chosen layout, to the first that does not fit."""
    found = []
    for size in (2**n for n in range(search.LARGEST_MICRO_BATCH.bit_length())):
        other = changed(one, str(size), training__micro_batch_size=size)
        if other is not None:
            found.append(other)
            if not other.fits:
                break
    return found


def global_batches(one: Alternative) -> list[Alternative]:
    """A quarter to four times as many sequences a step, in the chosen layout."""
    size = one.config.training.global_batch_size
    sizes = [size // 4, size // 2, size, 2 * size, 4 * size]
    found = (changed(one, f"{n:,}", training__global_batch_size=n) for n in sizes if n)
    return [other for other in found if other is not None]


def recomputes(one: Alternative) -> list[Alternative]:
    """Nothing, the MLPs, half of the blocks and all, in the chosen layout and micro batch."""
    layout, stage = one.config.layout, one.facts.num_blocks // (one.facts.pp * one.facts.vpp)
    number = layout.recompute_layers or max(1, stage // 2)
    ways: list[tuple[str, str, list[str], int | None]] = [
        ("none", "none", ["core_attn"], None),
        ("MLPs", "selective", ["mlp"], None),
        (f"{number} of {stage} blocks of a stage", "full", ["core_attn"], number),
        ("all blocks", "full", ["core_attn"], None),
    ]
    found = (
        changed(
            one,
            name,
            layout__recompute=way,
            layout__recompute_modules=modules,
            layout__recompute_layers=layers,
        )
        for name, way, modules, layers in ways
    )
    return [other for other in found if other is not None]


def best_with(asked: RunConfig, **layout: Any) -> Alternative | None:
    """The best choice with these settings of the layout; None: nothing is legal or fits."""
    config = asked.model_copy(update={"layout": asked.layout.model_copy(update=layout)})
    found = search.run(config, blocks(config.model.pattern, config.model.num_layers))
    if found is None or not found.best:
        return None
    best = found.best[0]
    return Alternative("", best.config, best.memory, best.speed)


def sequences(asked: RunConfig, times: Iterable[int] = (1, 2, 4)) -> Iterator[Alternative]:
    """Longer sequences with as many tokens a step where that is possible, each with its layout."""
    for factor in times:
        batch = asked.training.global_batch_size
        fewer = batch // factor if batch % factor == 0 else batch
        model = asked.model.model_copy(update={"seq_length": factor * asked.model.seq_length})
        training = asked.training.model_copy(update={"global_batch_size": fewer})
        yield estimated(
            f"{model.seq_length:,}",
            asked.model_copy(update={"model": model, "training": training}),
        )
