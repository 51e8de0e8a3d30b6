"""What people reported of Megatron, Transformer Engine and Bridge, and what a plan does about it.

Each case is a choice that went wrong for somebody, and what it comes to here: refused or warned of
with a way out, or planned so that it cannot happen.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from planning import memory
from planning.findings import errors
from planning.hardware import GPUS
from planning.parameters import padded_vocab_size
from planning.plan import Plan
from planning.resolve import Resolution, resolve
from tests import choices
from tests.choices import config

LLAMA = "model=llama3_8b hardware=b200 layout=ddp"


def planned(words: str) -> Resolution:
    return resolve(config(*words.split()))


def plan(words: str) -> Plan:
    resolution = planned(words)
    assert errors(resolution.findings) == []
    assert resolution.plan is not None
    return resolution.plan


def says(words: str, setting: str) -> str:
    """The message and the way out of the error about a setting."""
    found = [f for f in errors(planned(words).findings) if f.setting == setting]
    assert len(found) == 1, found
    return f"{found[0].message}; {found[0].fix}"


def test_mxfp8_with_e5m2_gradients_diverged_on_an_8b_model() -> None:
    said = says(f"{LLAMA} precision=mxfp8 precision.elements=hybrid", "precision.elements")
    assert said == "hybrid does not go with recipe mxfp8; take e4m3"


@pytest.mark.parametrize("missing", ["--overlap-grad-reduce", "--overlap-param-gather"])
def test_mxfp8_weights_without_both_overlaps_were_nan_in_the_second_step(missing: str) -> None:
    words = f"{LLAMA} precision=mxfp8 precision.param_gather=true"
    assert "NaN" in says(f"{words} layout.overlap=false", "layout.overlap")
    assert missing in plan(words).megatron_args


@pytest.mark.parametrize("precision", ["fp8", "fp8_delayed", "fp8_blockwise"])
def test_a_format_alone_saves_no_memory(precision: str) -> None:
    """Reported: FP8 took more than BF16 and ran out. Its weights stay in BF16 beside the copies."""
    sizes = []
    for name in ("bf16", precision):
        chosen = config(*f"model=llama3_8b hardware=h100 layout=fsdp precision={name}".split())
        found = memory.states(choices.facts(chosen))
        assert found is not None
        sizes.append(found.total)
    assert sizes[1] >= sizes[0]


@pytest.mark.parametrize(
    ("precision", "length", "enough"), [("mxfp8", 31936, 32000), ("fp8", 4092, 4096)]
)
def test_sequences_that_four_ranks_cannot_share_aborted_in_a_kernel(
    precision: str, length: int, enough: int
) -> None:
    words = f"model=llama3_8b hardware=b200 layout=tp4 precision={precision}"
    words += " training.micro_batch_size=1"
    said = says(f"{words} model.seq_length={length}", "model.seq_length")
    unit = int(said.split()[-1])
    assert -(-length // unit) * unit == enough
    plan(f"{words} model.seq_length={enough}")


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_consumer_blackwell_says_yes_and_its_kernels_fail(recipe: str) -> None:
    consumer = replace(GPUS["b200"], compute_capability=(12, 0))
    assert not consumer.supports(recipe)
    assert all(GPUS[name].supports(recipe) for name in ("b200", "b300", "gb200", "gb300"))


@pytest.mark.parametrize("vocabulary", [32_000, 50_257, 128_256, 151_936])
def test_the_vocabulary_was_padded_by_the_layout_and_once_twice(vocabulary: int) -> None:
    """Reported: 32,000 and 32,256 rows with TP 1 and 2; 151,936 became 303,872 with FSDP."""
    sizes, args = set(), set()
    for layout in ("ddp", "tp2", "tp4", "tp8", "fsdp", "tp2_pp2"):
        words = f"model=gpt_8b hardware=b300 layout={layout} model.vocab_size={vocabulary}"
        resolution = planned(words)
        assert resolution.plan is not None
        sizes.add(resolution.plan.derived.padded_vocab_size)
        given = resolution.plan.megatron_args
        args.add(given[given.index("--padded-vocab-size") + 1])
    (size,) = sizes
    assert args == {str(size)}
    assert vocabulary <= size < vocabulary + 128
    again = config("model=gpt_8b", f"model.vocab_size={size}")
    assert padded_vocab_size(again.model) == size


@pytest.mark.parametrize("hardware", ["h100", "b200"])
def test_fragmentation_ended_runs_with_a_third_of_the_memory_free(hardware: str) -> None:
    made = plan(f"model=gpt_1b hardware={hardware} layout=ddp")
    assert made.environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_overlap_inside_tensor_parallel_layers_crashed_without_mpi() -> None:
    """And fused gradient accumulation without APEX: neither is asked for."""
    for model, layout in product(("gpt_8b", "moe_8x1b"), ("tp2", "tp4", "tp2_pp2")):
        given = plan(f"model={model} hardware=b300 layout={layout}").megatron_args
        assert "--tp-comm-overlap" not in given
        assert "--no-gradient-accumulation-fusion" in given


def test_fp8_was_slower_than_bf16_at_a_hidden_size_of_1024() -> None:
    words = "model=gpt_160m hardware=h100 layout=ddp training.global_batch_size=128"
    for precision, warned in (("bf16", False), ("fp8", True)):
        found = planned(f"{words} precision={precision}").findings
        said = [f for f in found if f.setting == "precision"]
        assert bool(said) == warned
        assert all(f.severity == "warning" and "bf16" in f.fix for f in said)


def test_nvfp4_with_context_parallel_turned_to_nan() -> None:
    words = "model=llama3_8b hardware=b200 layout=cp2 precision=nvfp4 layout.recompute=full"
    warnings = [f for f in planned(words).findings if f.severity == "warning"]
    assert any("compare its first losses" in f.fix for f in warnings)


def test_nvfp4_under_fsdp_is_in_no_published_layout() -> None:
    assert "mxfp8" in says("model=gpt_8b hardware=b200 layout=fsdp precision=nvfp4",
                           "layout.sharding")  # fmt: skip


def test_fp16_skipped_its_first_steps_from_a_scale_of_two_to_the_32() -> None:
    given = plan("model=gpt_1b hardware=h100 layout=ddp precision=fp16").megatron_args
    assert given[given.index("--initial-loss-scale") + 1] == "65536.0"
