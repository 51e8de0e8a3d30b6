"""What a save takes, held against processes that saved."""

from __future__ import annotations

import pytest

from planning import decision, report, saving
from planning.findings import errors
from planning.hardware import GIB
from planning.resolve import Resolution, resolve
from tests.choices import config, facts

SMALL = "model=gpt_160m model.seq_length=64 hardware=cpu precision=fp32 data=mock"


def planned(words: str) -> Resolution:
    return resolve(config(*words.split()))


# Peaks of the resident memory of all processes (VmHWM) with checkpoint.save=true less those with
# false, on a CPU, 2026-12-01; GiB.
@pytest.mark.parametrize(
    ("layout", "measured", "too_much"),
    [
        ("hardware.gpus_per_node=1 layout=ddp layout.overlap=false", 8.55 - 3.81, 0.01),
        ("hardware.gpus_per_node=2 layout=pp2 layout.overlap=false",
         (4.88 + 4.73) - (2.57 + 2.50), 0.35),
        ("hardware.gpus_per_node=2 layout=pp2 layout.overlap=false "
         "layout.virtual_pipeline_parallel=2", (4.71 + 4.40) - (2.69 + 2.58), 0.35),
        ("hardware.gpus_per_node=1 layout=ddp", 7.33 - 3.50, 0.35),
        ("hardware.gpus_per_node=4 layout=ddp",
         (4.89 + 4.66 + 4.76 + 5.01) - (2.63 + 2.56 + 2.49 + 2.52), 0.35),
    ],
)  # fmt: skip
def test_hosts_held_what_is_said(layout: str, measured: float, too_much: float) -> None:
    chosen = config(*f"{SMALL} training.global_batch_size=4 {layout}".split())
    needed = saving.host_bytes(facts(chosen))
    assert needed is not None
    assert 0 <= needed / GIB / measured - 1 + 0.005 < too_much + 0.005


def test_only_ranks_that_share_the_optimizer_gather_it() -> None:
    model = "model=gpt_8b hardware=p6_b200 data=mock"
    assert (planned(f"{model} layout=fsdp").saving, planned(f"{model} layout=ddp").saving) == (
        0.0,
        pytest.approx(8 * 8.03e9 * 12, rel=0.2),
    )
    assert planned(f"{model} layout=ddp checkpoint.save=false").saving == 0.0


def test_a_node_that_cannot_hold_it_is_said_before_it_is_paid_for() -> None:
    # 24 B parameters fit in a B300, and 8 times 12 bytes of each do not in the 2 TiB of a P6-B200.
    words = "model=gpt_14b model.num_layers=80 data=mock layout=ddp precision.gradients=bf16"
    [error] = errors(planned(f"{words} hardware=p6_b300 hardware.instance_type="
                             "ml.p6-b200.48xlarge").findings)[-1:]  # fmt: skip
    assert error.id == "host-memory"
    assert "2,048 GiB" in error.message
    assert "layout=fsdp" in error.fix
    assert not [e for e in planned(f"{words} hardware=p6_b300").findings if e.id == "host-memory"]


@pytest.mark.parametrize(
    ("layout", "memory_efficient"),
    [
        ("ddp", False),
        ("tp2", False),
        ("pp2", True),
        ("pp2 layout.virtual_pipeline_parallel=2", True),
        ("pp2 layout.virtual_pipeline_parallel=4", False),  # an eighth of the model at a time
        ("ddp layout.overlap=false", True),
    ],
)
def test_a_state_in_one_bucket_is_not_gathered_on_the_gpu(
    layout: str, memory_efficient: bool
) -> None:
    plan = planned(f"model=gpt_8b hardware=p6_b200 data=mock layout={layout}").plan
    assert plan is not None
    flag = "--distrib-optim-fully-reshardable-mem-efficient"
    assert (flag in plan.megatron_args) == memory_efficient


def test_a_checkpoint_holds_weights_and_an_fp32_state() -> None:
    # However the moments are held: gpt_160m in FP32 wrote 2,538,475,490 bytes for 158,611,200.
    for words, each in (("precision=bf16", 14), ("precision=fp32", 16)):
        assert saving.checkpoint_bytes(10, config(words).precision) == 10 * each


# Every rank of gpt_32b with data parallelism alone gathers it all: 8 times 12 bytes a parameter.
ONE_SPLIT = (
    "model=gpt_32b data=mock hardware=p6_b200 layout.tensor_parallel=1 layout.pipeline_parallel=1 "
    "layout.sharding=optimizer precision.gradients=bf16 precision.optimizer_moments=bf16"
)


def test_what_fits_in_the_gpus_alone_is_not_called_a_fit() -> None:
    found = planned(ONE_SPLIT)
    assert found.held is not None
    assert found.held.needed < 178 * GIB
    assert [error.id for error in errors(found.findings)] == ["host-memory"]
    [compared] = [line for line in report.lines(found) if line.startswith("compared")]
    assert "none fits" in compared
    assert "2,981 GiB of a node's host memory" in compared
    alternatives = decision.recomputes(decision.estimated("bf16", config(*ONE_SPLIT.split())))
    assert {one.fits for one in alternatives} == {False}


def test_a_host_that_is_nearly_full_is_a_warning_and_not_what_a_search_takes() -> None:
    room, whole = 2048.0, 2048 * GIB
    said = [saving.check(share * whole, room, here=False) for share in (0.94, 0.96, 1.01)]
    assert [[finding.severity for finding in found] for found in said] == [
        [],
        ["warning"],
        ["error"],
    ]
    large = "model=llama31_405b precision=nvfp4 hardware=p6_b300 hardware.nodes=16 data=mock"
    options = planned(large).options
    assert options is not None
    assert options.best
    for option in options.best:
        assert (saving.host_bytes(option.facts) or 0) <= 4096 * GIB * (1 - saving.MARGIN)
    tight = planned(f"{large} layout.pipeline_parallel=2")
    assert errors(tight.findings) == []
    [compared] = [line for line in report.lines(tight) if line.startswith("compared")]
    assert "none leaves 5% of the memory free; the nearest needs" in compared
