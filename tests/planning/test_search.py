"""layout=auto: what it keeps, what it takes, and what is said where nothing fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from planning import changes, memory, rules, throughput
from planning.findings import errors
from planning.hardware import GIB
from planning.resolve import resolve
from planning.rules import Facts
from planning.schema import RunConfig
from planning.search import MARGIN, SHOWN, Search, Split, run, split_of, why_slower
from tests import choices

NODE = ("hardware=p6_b200",)


def searched(*words: str) -> Search:
    config = choices.config(*words)
    found = run(config, choices.facts(config).blocks)
    assert found is not None
    return found


def with_settings(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """The complete choice with `group.setting=value` changed, as a command line would."""
    values: dict[str, Any] = config.model_dump()
    for word in words:
        name, _, text = word.partition("=")
        group, _, setting = name.partition(".")
        plain = {"true": True, "false": False, "null": None, "[core_attn]": ["core_attn"]}
        values[group][setting] = plain.get(text, int(text) if text.isdigit() else text)
    return RunConfig.model_validate(values)


# ------------------------------------------------------------------ what is chosen


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("layout.tensor_parallel=2",), {"tensor_parallel": 2}),
        (("layout.pipeline_parallel=4", "layout.virtual_pipeline_parallel=2"),
         {"pipeline_parallel": 4, "virtual_pipeline_parallel": 2}),
        (("layout.sharding=fsdp", "layout.recompute=full"),
         {"sharding": "fsdp", "recompute": "full", "recompute_layers": None}),
        (("layout.recompute=full", "layout.recompute_layers=3"), {"recompute_layers": 3}),
        (("layout.context_parallel=2",), {"context_parallel": 2}),
        (("layout.cuda_graph=full",), {"cuda_graph": "full"}),
        (("layout=ddp",), {"tensor_parallel": 1, "sharding": "optimizer", "recompute": "none"}),
    ],
)  # fmt: skip
def test_what_was_set_stays(words: tuple[str, ...], kept: dict[str, object]) -> None:
    found = searched(*NODE, "model=gpt_3b", *words)
    assert found.best
    for option in found.best:
        assert {name: getattr(option.facts.layout, name) for name in kept} == kept


def test_a_micro_batch_that_was_set_stays_and_an_open_one_is_chosen() -> None:
    fixed = searched(*NODE, "model=gpt_8b", "training.micro_batch_size=1")
    assert {option.config.training.micro_batch_size for option in fixed.best} == {1}
    assert searched(*NODE, "model=gpt_8b").best[0].config.training.micro_batch_size == 2


def test_nothing_is_searched_where_nothing_is_open_or_estimated() -> None:
    for words in (
        ("hardware=p6_b200", "model=gpt_8b", "layout=ddp", "training.micro_batch_size=1"),
        ("hardware=cpu", "model=gpt_tiny"),
        ("hardware=p6_b200", "model=gpt_8b", "precision=fp32"),
    ):
        config = choices.config(*words)
        assert run(config, choices.facts(config).blocks) is None


@pytest.mark.parametrize(
    "words",
    [
        ("model=gpt_14b", "precision=mxfp8"),
        ("model=gpt_32b", "precision=nvfp4"),
        ("model=gpt_64b", "model.seq_length=32768"),
        ("model=moe_8x1b",),
        ("model=llama3_70b", "precision=fp8", "hardware.nodes=8"),
    ],
)
def test_every_option_is_legal_and_fits_with_the_margin(words: tuple[str, ...]) -> None:
    found = searched(*NODE, *words)
    assert len(found.best) > 1
    for option in found.best:
        assert errors(rules.check(option.facts)) == []
        capacity = memory.capacity_gib(option.facts)
        assert capacity is not None
        assert option.memory.needed <= capacity * GIB * (1 - MARGIN)
        assert option.memory == memory.estimate(option.facts)
        assert option.speed == throughput.estimate(option.config, option.facts)
    rates = [option.speed.step_s for option in found.best]
    assert rates == sorted(rates)
    splits = [option.split for option in found.best + found.too_large]
    assert len(splits) == len(set(splits))


def every(config: RunConfig) -> Iterator[Facts]:
    """All layouts of a small space, by brute force: the search's own, without its shortcuts."""
    blocks = choices.facts(config).blocks
    for tp, pp, vpp, sharding, size in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), ("optimizer", "fsdp"), (1, 2, 4, 8, 16, 32, 64)
    ):
        if config.layout.tensor_parallel == 1 and pp * tp > 1:
            continue
        if pp * tp > 8 or (pp == 1 and vpp > 1) or (sharding == "fsdp" and pp > 1):
            continue
        if sharding == "fsdp" and tp == 8:  # one rank, over which nothing is sharded
            continue
        stage = len(blocks) // (pp * vpp)
        recomputes: list[tuple[str, list[str], int | None]] = [
            ("none", ["core_attn"], None), ("selective", ["mlp"], None),
            *(("full", ["core_attn"], n) for n in (None, *range(1, stage))),
        ]  # fmt: skip
        for recompute, modules, layers in recomputes:
            layout = config.layout.model_copy(
                update={
                    "tensor_parallel": tp, "pipeline_parallel": pp, "sharding": sharding,
                    "virtual_pipeline_parallel": vpp, "context_parallel": 1, "expert_parallel": 1,
                    "sequence_parallel": tp > 1, "overlap": True, "recompute": recompute,
                    "recompute_modules": modules, "recompute_layers": layers,
                }
            )  # fmt: skip
            training = config.training.model_copy(update={"micro_batch_size": size})
            one = config.model_copy(update={"layout": layout, "training": training})
            yield Facts(one, layout, blocks)


# Sharded alone, so that recompute decides.
ALONE = ("layout.tensor_parallel=1", "layout.pipeline_parallel=1", "layout.context_parallel=1",
         "model.seq_length=16384")  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("hardware.memory_gib=40",),
        ("hardware.memory_gib=24", "precision=mxfp8"),
        (*ALONE, "hardware.memory_gib=52"),
        (*ALONE, "hardware.memory_gib=60"),
    ],
)
def test_the_choice_and_the_best_five_are_those_of_all(words: tuple[str, ...]) -> None:
    """What fits decides, so that all of the search comes in."""
    words = (*NODE, "model=gpt_14b", "model.num_layers=8", "layout.cuda_graph=none",
             "training.global_batch_size=64", *words)  # fmt: skip
    config = choices.config(*words)
    capacity = config.hardware.memory_gib
    assert capacity is not None
    fastest: dict[Split, float] = {}
    legal = 0
    for facts in every(config):
        if errors(rules.check(facts)):
            continue
        legal += 1
        held = memory.estimate(facts)
        assert held is not None
        if held.needed <= capacity * GIB * (1 - MARGIN):
            speed = throughput.estimate(facts.config, facts)
            assert speed is not None
            split = split_of(facts)
            fastest[split] = min(fastest.get(split, math.inf), speed.step_s)
    found = searched(*words)
    shown = [option.speed.step_s for option in found.best[:SHOWN]]
    assert shown == pytest.approx(sorted(fastest.values())[:SHOWN], rel=1e-9)
    assert found.tried < legal / 2  # what the shortcuts are for


def test_recompute_is_of_the_mlps_or_of_the_fewest_blocks() -> None:
    words = (*NODE, "model=gpt_14b", "model.num_layers=8", *ALONE)
    mlps = searched(*words, "hardware.memory_gib=52").best[0].facts.layout
    assert (mlps.recompute, mlps.recompute_modules) == ("selective", ["mlp"])
    blocks = searched(*words, "hardware.memory_gib=60").best[0].facts.layout
    assert (blocks.recompute, blocks.recompute_layers) == ("full", 2)


def test_the_least_recompute_that_fits_is_taken() -> None:
    words = (*NODE, "model=gpt_14b", "precision=mxfp8", "layout=fsdp", "layout.recompute=null",
             "training.micro_batch_size=2")  # fmt: skip
    best = searched(*words).best[0]
    number = best.facts.layout.recompute_layers
    assert number is not None
    fewer = best.facts.layout.model_copy(update={"recompute_layers": number - 1})
    held = memory.estimate(
        Facts(best.config.model_copy(update={"layout": fewer}), fewer, best.facts.blocks)
    )
    capacity = memory.capacity_gib(best.facts)
    assert held is not None
    assert capacity is not None
    assert held.needed > capacity * GIB * (1 - MARGIN) >= best.memory.needed


def test_a_larger_micro_batch_may_be_legal_where_a_smaller_one_is_not() -> None:
    """MXFP8 needs rows in 32: 8,208 tokens are 256.5 of them, twice as many are 513."""
    words = (*NODE, "model=gpt_1b", "precision=mxfp8", "model.seq_length=8208")
    best = searched(*words).best[0]
    assert best.config.training.micro_batch % 2 == 0


def test_a_graph_is_taken_where_launches_cost() -> None:
    small = ("hardware=h200", "hardware.gpus_per_node=1", "model=gpt_160m", "precision=fp8",
             "training.micro_batch_size=1")  # fmt: skip
    assert searched(*small).best[0].facts.layout.cuda_graph == "full"
    assert searched(*NODE, "model=gpt_8b").best[0].facts.layout.cuda_graph == "none"


def test_why_one_lost_names_the_part_that_grew() -> None:
    found = searched(*NODE, "model=gpt_8b")
    tensor = next(option for option in found.best if option.facts.tp == 2)
    assert "tensor parallel" in why_slower(tensor, found.best[0])
    assert "% slower" in why_slower(tensor, found.best[0])


# ------------------------------------------------------------------ what would make it fit


@pytest.mark.parametrize(
    "words",
    [
        ("model=gpt_32b", "layout=ddp", "training.micro_batch_size=1"),
        ("model=gpt_8b", "layout=ddp", "training.micro_batch_size=8"),
        ("model=gpt_14b", "layout=tp2", "precision=fp8", "training.micro_batch_size=8"),
        ("model=gpt_14b", "layout=ddp", "layout.recompute=selective",
         "layout.recompute_modules=[mlp]", "training.micro_batch_size=4"),
    ],
)  # fmt: skip
def test_each_change_makes_it_fit_at_the_price_that_is_said(words: tuple[str, ...]) -> None:
    if "layout.recompute_modules=[mlp]" in words:
        chosen = choices.config(*NODE, *(w for w in words if "modules" not in w))
        layout = chosen.layout.model_copy(update={"recompute_modules": ["mlp"]})
        config = chosen.model_copy(update={"layout": layout})
    else:
        config = choices.config(*NODE, *words)
    facts = choices.facts(config)
    held, before = memory.estimate(facts), throughput.estimate(config, facts)
    assert held is not None
    assert before is not None
    assert held.needed > 178.3 * GIB
    ways = changes.that_fit(facts)
    assert len(ways) == 3
    assert len({way.kind for way in ways}) == 3
    for way in ways:
        changed = choices.facts(with_settings(config, way.settings.split()))
        assert errors(rules.check(changed)) == []
        after, speed = memory.estimate(changed), throughput.estimate(changed.config, changed)
        assert after is not None
        assert speed is not None
        assert after.needed <= 178.3 * GIB * (1 - MARGIN)
        cost = speed.step_s * changed.world_size / (before.step_s * facts.world_size)
        assert way.step == pytest.approx(cost)
        assert ("slower" if cost >= 1 else "faster") in str(way)


def test_where_nothing_fits_the_nearest_and_the_ways_out_are_said() -> None:
    resolution = resolve(choices.config(*NODE, "model=llama31_405b"))
    assert resolution.options is not None
    assert resolution.options.best == []
    nearest = [option.memory.needed for option in resolution.options.too_large]
    assert nearest == sorted(nearest)
    assert resolution.held is not None
    assert resolution.held.needed == nearest[0]
    (error,) = errors(resolution.findings)
    assert error.id == "memory"
    assert f"{resolution.held.needed / GIB - 178.3:,.0f} GiB more than its 178 GiB" in error.message
    assert "hardware.nodes=" in error.fix


def test_a_layout_that_nobody_chose_is_not_said_to_be_too_large() -> None:
    # An error stops the search: that plain data parallelism has no room is beside the point.
    moments = ("precision=fp8", "precision.param_gather=true", "precision.optimizer_moments=fp8")
    resolution = resolve(choices.config(*NODE, "model=llama3_70b", *moments))
    assert [error.setting for error in errors(resolution.findings)] == [
        "precision.optimizer_moments"
    ]


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("hardware=p6_b300", "hardware.nodes=4"), "take more GPUs (hardware.nodes=8)"),
        (("hardware=h200",), "(hardware.nodes=2, or hardware=b300 launch=plan)"),
    ],
)
def test_larger_hardware_is_larger_than_what_was_named(words: tuple[str, ...], way: str) -> None:
    # States alone are said where a rule forbids the estimate: here, FP32 on a GPU.
    given = ("model=llama31_405b", "layout=replicated", "precision=fp32", "data=mock")
    resolution = resolve(choices.config(*words, *given))
    [error] = [error for error in errors(resolution.findings) if error.id == "memory"]
    assert way in error.fix
