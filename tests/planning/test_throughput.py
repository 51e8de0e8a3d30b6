"""The speed model by value: against measured and published steps, and in what it must not do."""

from __future__ import annotations

import json
import statistics
import time

import pytest

from benchmarks import fit, throughput_model
from planning import communication, cost, kernels, report, throughput
from planning.resolve import resolve
from planning.rules import Facts
from planning.schema import BlockFormulas
from planning.throughput import Estimate
from tests import choices
from tests.choices import estimated as choose

ALONE = ("hardware=h200", "hardware.gpus_per_node=1", "layout=ddp", "data=mock")
NODE = ("hardware=p6_b200", "layout=ddp", "data=mock")


def speed(*words: str) -> Estimate:
    found = throughput_model.predict(choose(words))
    assert found is not None
    return found


# ------------------------------------------------------------------ held against real steps


def test_steps_of_an_h200_are_met() -> None:
    rows = throughput_model.measured(choose)
    unseen = [abs(row.error) for row in rows if not row.fit]
    assert len(rows) >= 25
    assert len(unseen) >= len(rows) / 2  # the others calibrate
    assert statistics.median(unseen) < 0.03
    assert max(unseen) < 0.10
    assert statistics.median(abs(row.error) for row in rows) < 0.03


def test_published_steps_are_met() -> None:
    rows = throughput_model.published(choose)
    unseen = [row for row in rows if not row.fit]
    assert len(unseen) >= 2 * (len(rows) - len(unseen))
    assert {row.name: row.error for row in rows if abs(row.error) > 0.10} == {}


@pytest.mark.parametrize(
    ("section", "format"),
    [
        ("gemm_bf16", "bf16"),
        ("gemm_fp8_current", "fp8"),
        ("gemm_fp8_blockwise", "fp8_blockwise"),
        ("head", "head"),
    ],
)
def test_the_curves_are_those_of_the_kernels(section: str, format: str) -> None:
    """Products by themselves, which are as much faster as `sustained` says."""
    rows = json.loads((throughput_model.HERE / "h200/kernels.json").read_text())["sections"]
    card, steady = kernels.kernels("h200"), kernels.curves()["sustained"]
    errors = [
        abs(card.gemm(format, fit.KINDS[row["pass"]], *fit.product(row)) * steady / row["s"] - 1)
        for row in rows[section]
    ]
    assert statistics.median(errors) < 0.06
    assert statistics.quantiles(errors, n=10)[-1] < 0.17  # nine tenths of them


def test_no_figure_of_blackwell_is_called_measured() -> None:
    assert speed(*NODE, "model=gpt_8b").basis == "calibrated on published rows"
    assert speed("hardware=b300", "layout=ddp", "model=gpt_8b").basis == "extrapolated"
    assert speed(*ALONE, "model=gpt_1b").basis == "measured on H200"
    assert speed("hardware=h200", "layout=ddp", "model=gpt_1b").basis == (
        "measured on H200, links estimated"
    )
    assert speed(*ALONE, "model=moe_8x1b").basis == "extrapolated"


# ------------------------------------------------------------------ what the figures mean


def test_parts_add_up_and_rates_follow_from_the_step() -> None:
    found = speed(*NODE, "model=llama3_8b", "precision=mxfp8")
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.tokens_per_s_per_gpu == pytest.approx(128 * 8192 / 8 / found.step_s)
    # 51.47 GFLOP a token: causal attention by half.
    assert found.model_tflops_per_gpu == pytest.approx(found.tokens_per_s_per_gpu * 51.4704e-3)
    assert (found.mfu_peak_tflops, found.mfu_format) == (4500, "FP8")
    assert found.mfu == pytest.approx(found.model_tflops_per_gpu / 4500)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("layout=tp2",), "tensor parallel"),
        (("layout=tp8", "layout.context_parallel=2", "hardware.nodes=2"), "context parallel"),
        (("layout=pp2",), "pipeline bubble"),
        (("layout=fsdp",), "data parallel"),
        (("layout=ep8", "model=moe_8x1b"), "expert parallel"),
        (("layout=ddp", "layout.recompute=full"), "recompute"),
        (("layout=ddp", "precision=mxfp8"), "quantisation"),
    ],
)
def test_a_layouts_price_has_its_name(words: tuple[str, ...], part: str) -> None:
    plain = speed("hardware=p6_b200", "layout=ddp", "model=gpt_1b", "precision=bf16")
    assert part not in plain.parts or part == "data parallel"
    assert speed("hardware=p6_b200", "model=gpt_1b", "precision=bf16", *words).parts[part] > 0


def test_a_bubble_shrinks_with_more_micro_batches_and_virtual_stages() -> None:
    def share(*words: str) -> float:
        found = speed("hardware=p6_b200", "model=gpt_32b", "layout=tp2_pp4", *words)
        return found.parts["pipeline bubble"] / found.step_s

    few, many = share("training.global_batch_size=8"), share("training.global_batch_size=128")
    virtual = share("training.global_batch_size=8", "layout.virtual_pipeline_parallel=4")
    assert few == pytest.approx(3 / (8 + 3), rel=0.25)  # (PP-1) / (micro batches + PP-1)
    assert many < few / 5
    assert virtual < few / 2.5


def test_recompute_costs_what_is_computed_again() -> None:
    def step(*words: str) -> float:
        return speed(*ALONE, "model=gpt_8b", *words).step_s

    none = step()
    full = step("layout.recompute=full") / none
    half = step("layout.recompute=full", "layout.recompute_layers=16") / none
    attention = step("layout.recompute=selective") / none
    assert 1.2 < full < 1.33
    assert half - 1 == pytest.approx((full - 1) / 2, rel=0.02)
    assert 1.0 < attention < 1.08


def test_a_graph_saves_the_launches_of_a_small_model() -> None:
    words = (*ALONE, "model=gpt_160m", "precision=fp8")
    eager, graph = speed(*words), speed(*words, "layout.cuda_graph=full")
    assert eager.parts["launch gaps"] > 0.25 * eager.step_s
    assert graph.step_s == pytest.approx(eager.step_s - eager.parts["launch gaps"], rel=0.02)


def test_a_network_is_slower_than_nvlink_and_hidden_where_there_is_time() -> None:
    words = ("model=llama3_8b", "layout=ddp", "training.global_batch_size=256")
    near = speed("hardware=p6_b200", *words)
    far = speed("hardware=p6_b200", "hardware.nodes=8", *words)
    open_ = speed("hardware=p6_b200", "hardware.nodes=8", "layout.overlap=false", *words)
    assert near.parts["data parallel"] < far.parts["data parallel"] < open_.parts["data parallel"]
    # 8 B gradients of 4 bytes and weights of 2, each once around a ring of 8 x 400 Gb/s a node.
    assert open_.parts["data parallel"] == pytest.approx(8.03e9 * 6 / (8 * 40e9), rel=0.05)


def test_collectives_take_what_a_ring_takes() -> None:
    part = choices.part("hardware", "p5en")
    links = communication.links(part.model_copy(update={"nodes": 2}))
    assert links is not None
    node, both = links.group(8, 1), links.group(16, 1)
    gib = 2.0**30
    assert node.gather(8 * gib) == pytest.approx(7 * gib / (450e9 * 0.78), rel=0.01)
    assert both.gather(8 * gib) == pytest.approx(7.5 * gib / (450e9 * 0.78), rel=0.15)
    # One GPU a node has one adapter; eight have eight.
    assert links.group(2, 8).gather(8 * gib) == pytest.approx(4 * gib / (50e9 * 0.8), rel=0.01)
    assert node.reduce(gib) == pytest.approx(2 * node.gather(gib))
    assert links.group(1, 1).gather(gib) == 0.0


def test_what_cannot_be_estimated_is_not() -> None:
    for words in (
        ("hardware=cpu", "model=gpt_tiny"),
        (*ALONE, "model=gpt_1b", "precision=fp32"),
        (
            "hardware=b200",
            "layout=ddp",
            "model=gpt_1b",
            "precision=mxfp8",
            "precision.emulate=true",
        ),
        (*ALONE, "model=gpt_1b", "model.stack=parallel"),
    ):
        assert throughput_model.predict(choose(words)) is None


def test_a_block_of_formulas_alone_is_extrapolated() -> None:
    config = choose((*ALONE, "model=gpt_1b"))
    formulas = BlockFormulas(
        parameters="12*hidden_size**2", flops="24*hidden_size**2", activation_bytes="34*hidden_size"
    )
    model = config.model.model_copy(update={"stack": "parallel", "formulas": formulas})
    found = throughput_model.predict(config.model_copy(update={"model": model}))
    assert found is not None
    assert found.basis == "extrapolated"
    assert 0.3 < found.mfu < 0.8


def test_an_estimate_takes_under_a_millisecond() -> None:
    config = choose(("hardware=p6_b200", "hardware.nodes=8", "model=gpt_64b", "layout=tp2_pp4"))
    facts = Facts.of(config)
    throughput.estimate(config, facts)
    times = []
    for _ in range(20):
        began = time.process_time()
        throughput.estimate(config, facts)
        times.append(time.process_time() - began)
    assert min(times) < 0.002  # a millisecond, on a busy machine twice


# ------------------------------------------------------------------ cost


def test_the_cost_is_the_users_price_for_the_time() -> None:
    config = choose(
        (*NODE, "hardware.nodes=2", "hardware.price_per_node_hour=100", "model=gpt_8b",
         "training.global_batch_size=512", "training.train_steps=1000")
    )  # fmt: skip
    found = cost.estimate(config, step_s=3.6)
    assert found.hours == pytest.approx(1.0)
    assert found.gpu_hours == pytest.approx(16.0)
    assert found.usd_per_step == pytest.approx(0.2)
    assert found.usd == pytest.approx(200.0)
    billions = 512 * 8192 * 1000 / 1e9
    assert found.usd_per_billion_tokens == pytest.approx(200 / billions)
    assert found.gpu_hours_per_billion_tokens == pytest.approx(16 / billions)


def test_without_a_price_there_is_time_alone() -> None:
    found = cost.estimate(choose((*NODE, "model=gpt_8b")), step_s=3.6)
    assert (found.usd, found.usd_per_step, found.usd_per_billion_tokens) == (None, None, None)
    assert found.gpu_hours > 0


# ------------------------------------------------------------------ advice


def warnings(*words: str) -> dict[str, str]:
    resolution = resolve(choose(words))
    assert resolution.speed is not None, resolution.findings
    return {f.id: f.message for f in resolution.findings if f.source == "planning/throughput.py"}


def test_a_low_precision_that_does_not_pay_is_said() -> None:
    """A model of hidden size 1024: casts and launches cost more than the products gain."""
    small = ("model=gpt_160m", "model.hidden_size=1024", "model.ffn_hidden_size=4096",
             "model.num_attention_heads=16", "model.num_query_groups=16", "model.seq_length=1024",
             "training.global_batch_size=8")  # fmt: skip
    said = warnings(*ALONE, *small, "precision=fp8")
    assert "times those of BF16" in said["low-precision-pays"]
    assert "low-precision-pays" not in warnings(*ALONE, *small, "precision=bf16")
    assert "low-precision-pays" not in warnings(
        *NODE, "model=gpt_8b", "precision=fp8", "training.micro_batch_size=2"
    )


def test_a_micro_batch_that_leaves_the_gpu_idle_is_said() -> None:
    short = ("model=gpt_160m", "model.seq_length=512", "training.global_batch_size=64")
    said = warnings(*ALONE, *short, "training.micro_batch_size=1")
    assert "2 is predicted" in said["micro-batch"]
    assert "micro-batch" not in warnings(*NODE, "model=gpt_8b")


def test_a_micro_batch_that_would_not_fit_is_no_advice() -> None:
    words = (*ALONE, "model=gpt_160m", "model.seq_length=512", "training.global_batch_size=64")
    needed = []
    for size in (8, 16):
        held = resolve(choose((*words, f"training.micro_batch_size={size}"))).held
        assert held is not None
        needed.append(held.needed / 2**30)
    between = f"hardware.memory_gib={sum(needed) / 2:.3f}"
    assert "micro-batch" in warnings(*words, "training.micro_batch_size=8")
    assert "micro-batch" not in warnings(*words, "training.micro_batch_size=8", between)


def test_a_global_batch_of_few_micro_batches_is_said() -> None:
    few = warnings(*ALONE, "model=gpt_1b", "model.seq_length=1024", "training.global_batch_size=1")
    assert "1 micro batch a GPU" in few["global-batch-small"]
    assert "global-batch-small" not in warnings(*ALONE, "model=gpt_1b")


def test_the_plan_says_its_speed_and_cost() -> None:
    words = (*NODE, "model=gpt_8b", "hardware.price_per_node_hour=100")
    resolution = resolve(choose(words))
    assert resolution.speed is not None
    verdict = report.to_json(resolution)
    assert verdict["throughput"]["step_s"] == resolution.speed.step_s
    assert sum(verdict["throughput"]["parts"].values()) == pytest.approx(resolution.speed.step_s)
    days = resolution.speed.step_s * 150_000 / 86400
    assert verdict["cost"]["usd"] == pytest.approx(days * 24 * 100)
    shown = {line[:11].strip(): line[11:] for line in report.lines(resolution)}
    assert "of 2,250 (dense BF16); calibrated on published rows" in shown["speed"]
    assert f"{days:.3g} days the run" in shown["cost"]
    assert "USD a billion tokens" in shown["cost"]


def test_a_job_that_ends_before_its_run_is_said() -> None:
    job = ("hardware=p6_b200", "model=gpt_8b", "launch=sagemaker", "data=mock")
    config = choices.config(*job)  # 150,000 steps
    found = {finding.id: finding.message for finding in resolve(config).findings}
    assert "and a job ends after 24" in found["time-limit"]
    short = choices.config(*job, "training.train_steps=1000")
    assert "time-limit" not in {finding.id for finding in resolve(short).findings}


def test_warnings_do_not_make_a_plan_illegal() -> None:
    resolution = resolve(choose((*ALONE, "model=gpt_1b", "training.global_batch_size=1")))
    assert all(finding.severity == "warning" for finding in resolution.findings)
    assert resolution.plan is not None
