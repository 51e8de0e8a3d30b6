"""What planning calls legal, the installed Megatron accepts and leaves as it is; what Megatron
refuses, a rule refuses first.

Megatron is asked in a process of its own (ask_megatron.py): its parser and validate_args, the
configurations that it makes of the arguments, Transformer Engine's recipes where they are at hand,
its schedules and its process groups. The choices are those of conf/ in each other's company, random
command lines (generated.py), and every rule's example.

SLIPWAY_AGREEMENT=20000 asks about more than the default; benchmarks/agreement.md has its figures.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from planning import resolve as resolving
from planning import search
from planning.findings import ChoiceError, Finding, errors
from planning.hardware import GPUS
from planning.parameters import count
from planning.plan import Plan
from planning.resolve import resolve
from planning.rules import Facts, check
from planning.schema import RunConfig
from tests.choices import GROUPS, ROOT, combine, config, line, product
from tests.planning.generated import build, choices, words
from tests.planning.test_rules import EXAMPLES, Example

GENERATED = int(os.environ.get("SLIPWAY_AGREEMENT", "2000"))
ENOUGH = 2_000  # choices that have all kinds of plan among them
SAMPLED = 300  # of the product's 40,000 choices

HAVE_TE = bool(os.environ.get("SLIPWAY_TE_SITE")) or find_spec("transformer_engine") is not None


class Megatron:
    """The process that is asked; its answers by question."""

    def __init__(self) -> None:
        search = [site] if (site := os.environ.get("SLIPWAY_TE_SITE")) else []
        self._errors = open(os.devnull, "w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.planning.ask_megatron"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*search, str(ROOT)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answers: dict[str, dict[str, Any]] = {}

    def ask(self, plan: Plan, arguments: list[str] | None = None) -> dict[str, Any]:
        question = json.dumps(
            {
                "arguments": arguments or plan.megatron_args,
                "environment": plan.environment,
                "world_size": plan.derived.world_size,
                "capability": GPUS[plan.config.hardware.gpu or "cpu"].compute_capability,
                "model": plan.config.model.model_dump(mode="json"),
                "backend": plan.backend,
            }
        )
        if question not in self._answers:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, f"the process ended with {self._process.wait()} at {question}"
            self._answers[question] = json.loads(answer)
        return self._answers[question]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Stricter:
    """What a rule refuses although Megatron's checks let it through."""

    rule: str
    says: str  # in the rule's message; empty: all of them
    why: str


UNREAD = "nothing would read the setting"
LATER = "Megatron raises later, when it builds or runs the model"
STRICTER = [
    Stricter("amax-history", "", UNREAD),
    Stricter("bf16-blocks", "mean nothing", UNREAD),
    Stricter("bf16-blocks", "leave none", "the format would do nothing"),
    Stricter("cpu-fp16", "", "no kernels"),
    Stricter("cpu-fsdp-save", "", LATER),
    Stricter("cpu-layers", "", "no kernels"),
    Stricter("cuda-graph", "", "unproven, or it cannot be captured"),
    Stricter("evaluation", "", "Megatron evaluates nothing, in silence"),
    Stricter("experts-given", "has no expert layer", UNREAD),
    Stricter("experts-given", "uneven", "the loss would reward what it is there to prevent"),
    Stricter("experts-given", " of ", LATER),
    Stricter("fsdp", "wrong losses", "measured"),
    Stricter("fsdp", "always overlaps", "Megatron changes it later, in silence"),
    Stricter("fsdp", "two stages", LATER),
    Stricter("fsdp2", "overlaps by itself", UNREAD),
    Stricter("fsdp2", "cannot be saved", LATER),
    Stricter("fsdp2", "sums gradients", "Megatron does not do what was asked, in silence"),
    Stricter("fused-attention", "", "Transformer Engine would compute unfused, in silence"),
    Stricter("gated-delta-net-heads", "", LATER),
    Stricter("head-size", "", "the plan gives --kv-channels, and Megatron looks at it later"),
    Stricter("heads-groups", "", LATER),
    Stricter("instance", "", "no such instance"),
    Stricter("learning-rate", "never falls", UNREAD),
    Stricter("loss-scale", "means nothing", UNREAD),
    Stricter("loss-scale", "below", LATER),
    Stricter("moe-sequence-parallel", "", LATER),
    Stricter("nvfp4-sharding", "", "unproven"),
    Stricter("formulas", "", "Megatron reads none"),
    Stricter("optimizer-moments", "not saved with their scales", "a resumed run would be another"),
    Stricter("optimizer-moments", "a CPU", "the optimizer of precision is Transformer Engine's"),
    Stricter("param-gather", "no low precision format", UNREAD),
    Stricter("param-gather", "nvfp4 weights", "Megatron checks it for FP8 only"),
    Stricter("param-gather", "NaN", "reported"),
    Stricter("precision-dtype", "", "unproven"),
    Stricter("precision-emulate", "", "not there"),
    Stricter("precision-format", "precision.format=none", UNREAD),
    Stricter("precision-format", "recipe none", UNREAD),
    Stricter("precision-format", "hybrid does not go with recipe mxfp8", "reported to diverge"),
    Stricter("precision-gpu", "CPU", "without Transformer Engine it would be BF16, in silence"),
    Stricter("quantised-shapes", "", LATER),
    Stricter("recompute", "means nothing", UNREAD),
    Stricter("recompute", "has none", UNREAD),
    Stricter("recompute", "a pipeline stage has", "more than there is"),
    Stricter("recompute", "shared_experts: no module", UNREAD),
    Stricter("recompute", "layernorm: only Transformer Engine's", LATER),
    Stricter("sequence-split", "sequence parallel over", LATER),
    Stricter("sgd-sharding", "", LATER),
    Stricter("recompute-mlp-quantised", "", LATER),
    Stricter("tensor-parallel-node", "", "an order of magnitude slower"),
    Stricter("unused-data", "", UNREAD),
    Stricter("tokenizer-vocabulary", "", LATER),
    Stricter("model-name", "", "it is a folder"),
    Stricter("unused-strategy", "", UNREAD),
    Stricter("virtual-pipeline-batch", "", LATER),
]
if not HAVE_TE:  # which looks at the card, and of which the layers of a GPU are
    STRICTER += [
        Stricter("precision-gpu", "", "Transformer Engine refuses it"),
        Stricter("optimizer-moments", "", "Megatron asks for its FusedAdam first"),
        Stricter("experts-given", "has experts", LATER),
        Stricter("tensor-parallel-shapes", "", LATER),
    ]


def exception(finding: Finding) -> Stricter | None:
    return next((s for s in STRICTER if s.rule == finding.id and s.says in finding.message), None)


def judged(config: RunConfig) -> tuple[list[Finding], Plan | None]:
    """The errors of a choice, and what Megatron would be told: of a refused one too.

    As resolve does it, without its search and its estimates. No plan: Megatron's arguments cannot
    say it.
    """
    model = config.model
    config = config if search.complete(config) else search.plain(config)
    try:
        facts = Facts.of(config)
    except ChoiceError as refusal:
        return refusal.findings, None
    found = errors(check(facts))
    try:
        count(model)
    except ChoiceError as refusal:
        said = {finding.setting for finding in found}
        found += [finding for finding in refusal.findings if finding.setting not in said]
    try:
        return found, resolving._plan(config, facts, None)
    except (ChoiceError, KeyError):  # KeyError: a recipe that its format does not have
        return found, None


def kinds(config: RunConfig) -> Iterator[str]:
    """What a choice is an instance of."""
    model, precision, layout = config.model, config.precision, config.layout
    gpu = GPUS[config.hardware.gpu or "cpu"]
    card = "cpu" if gpu.is_cpu else "blackwell" if gpu.is_blackwell else "hopper"
    bf16_blocks = bool(precision.layers_in_bf16_at_start or precision.layers_in_bf16_at_end)
    sharding = layout.sharding
    if sharding == "fsdp":
        sharding = layout.fsdp_strategy
    format = precision.dtype if precision.recipe == "none" else precision.recipe
    yield f"{format} on {card}"
    yield f"{format} with {sharding}"
    yield f"{format}, gradients in {precision.gradients}"
    yield f"{format}, moments in {precision.optimizer_moments}"
    if precision.param_gather:
        yield f"{format}, weights too, with {sharding}"
    if bf16_blocks:
        yield f"{format}, blocks in BF16"
    yield f"{sharding}, {'tied' if model.tied_embeddings else 'untied'}"
    yield f"{sharding}, {'overlap' if layout.overlap else 'no overlap'}"
    sizes = {
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "virtual pipeline": layout.virtual_pipeline_parallel,
        "context": layout.context_parallel,
        "expert": layout.expert_parallel,
    }
    for name, size in sizes.items():
        if (size or 1) > 1:
            yield f"{name} parallel on {card}"
    yield f"sequence parallel {layout.sequence_parallel}, tensor {layout.tensor_parallel}"
    blocks_of = "" if layout.recompute_layers is None else " of some blocks"
    if layout.recompute == "selective":
        for module in layout.recompute_modules:
            yield f"recompute {module}"
    else:
        yield f"recompute {layout.recompute}{blocks_of}"
    yield f"graph {layout.cuda_graph}"
    yield f"optimizer {config.training.optimizer.name}"


RECIPES = ("delayed", "current", "blockwise", "mxfp8", "nvfp4")
SHARDINGS = ("none", "optimizer", "optim", "optim_grads", "optim_grads_params", "fsdp2")
KINDS = {
    *(f"{r} on hopper" for r in ("bf16", "fp16", "fp32", "delayed", "current", "blockwise")),
    *(f"{r} on blackwell" for r in ("bf16", "fp16", "fp32", *RECIPES)),
    *("bf16 on cpu", "fp32 on cpu"),
    *(f"bf16 with {s}" for s in SHARDINGS),
    *(f"{r} with {s}" for r in RECIPES for s in ("none", "optimizer")),
    *(f"{r}, gradients in bf16" for r in ("bf16", *RECIPES)),
    *(f"{r}, moments in {m}" for r in ("bf16", *RECIPES) for m in ("fp32", "bf16", "fp8")),
    *(f"{r}, weights too, with optimizer" for r in RECIPES),
    *(f"{r}, blocks in BF16" for r in RECIPES if r != "delayed"),
    *(f"{s}, {t}" for s in SHARDINGS for t in ("tied", "untied") if (s, t) != ("fsdp2", "tied")),
    *(f"{s}, overlap" for s in SHARDINGS if s not in ("optim", "fsdp2")),
    *(f"{s}, no overlap" for s in ("none", "optimizer", "optim", "fsdp2")),
    *(f"{p} parallel on {c}" for p in ("tensor", "pipeline") for c in ("hopper", "blackwell")),
    *(f"{p} parallel on blackwell" for p in ("virtual pipeline", "context", "expert")),
    *(f"sequence parallel {s}, tensor 2" for s in (True, False)),
    "fp16 with optimizer",
    *(f"recompute {m}" for m in ("none", "full", "full of some blocks")),
    *(f"recompute {m}" for m in ("core_attn", "mlp", "moe", "moe_act", "layernorm")),
    *("graph none", "graph full", "optimizer adam", "optimizer sgd"),
}


@dataclass
class Comparison:
    """Asks Megatron about choices and counts what both say."""

    megatron: Megatron
    outcomes: Counter[str] = field(default_factory=Counter)
    stricter: Counter[Stricter] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)  # of accepted plans

    def disagreement(self, chosen: RunConfig) -> str | None:
        """What one of them says and the other does not; None: they agree."""
        found, plan = judged(chosen)
        if plan is None:
            assert found
            self.outcomes["refused; no arguments say it"] += 1
            return None
        answer = self.megatron.ask(plan)
        refused, silent = answer["refused"], answer["silent"]
        exceptions = [exception(finding) for finding in found]
        if refused is not None:
            self.outcomes["refused by both"] += bool(found)
            return None if found else f"Megatron alone refuses: {refused}"
        if not found:
            self.outcomes["accepted by both"] += 1
            self.kinds.update(kinds(plan.config))
            return f"Megatron changes {silent}" if silent else None
        self.outcomes["refused by planning alone"] += 1
        self.stricter.update(e for e in exceptions if e is not None)
        if None not in exceptions:
            return None
        finding = found[exceptions.index(None)]
        return f"Megatron accepts what {finding.id} refuses: {finding.message}"

    def table(self) -> str:
        lines = [f"{n:7,} {outcome}" for outcome, n in self.outcomes.most_common()]
        lines += [f"{n:7,} {s.rule} {s.says!r}: {s.why}" for s, n in self.stricter.most_common()]
        return "\n".join(lines)


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    process = Megatron()
    yield process
    process.close()


@pytest.fixture(scope="module")
def seen(megatron: Megatron) -> Comparison:
    """All that the tests of this file asked."""
    return Comparison(megatron)


def test_they_agree_on_command_lines_at_random(
    seen: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()

    @settings(
        max_examples=GENERATED,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(choices())
    def agree(choice: tuple[dict[str, str], list[tuple[str, Any]]]) -> None:
        disagreement = seen.disagreement(build(*choice))
        assert disagreement is None, f"{words(*choice)}\n{disagreement}"

    agree()
    with capsys.disabled():
        print(f"\n{GENERATED:,} in {time.monotonic() - started:.0f} s\n{seen.table()}")
    outcomes = seen.outcomes
    assert outcomes["accepted by both"] > GENERATED / 5
    assert outcomes["refused by both"] > GENERATED / 5


def test_they_agree_on_the_choices_of_conf(seen: Comparison) -> None:
    every = list(product())
    sample = random.Random(0).sample(every, SAMPLED)
    for group in GROUPS:
        assert {groups[group] for groups in sample} == {groups[group] for groups in every}
    for groups in sample:
        resolution = resolve(combine(groups))  # with the layout that it searches
        disagreement = seen.disagreement(resolution.config)
        assert disagreement is None, f"{line(groups)}\n{disagreement}"


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_they_agree_on_the_example_of_a_rule(seen: Comparison, example: Example) -> None:
    for changes in (example.breaks, example.passes):
        chosen = config(*f"{example.common} {changes}".split())
        assert (disagreement := seen.disagreement(chosen)) is None, f"{changes}\n{disagreement}"


# Options added to a legal plan -> what Megatron says.
BROKEN = {
    "--sequence-parallel": "Megatron turns --sequence-parallel True into False",
    "--num-attention-heads 30 --tensor-model-parallel-size 4": "must be a multiple of",
    "--lr-warmup-fraction 0.1": "can only specify one of lr-warmup-fraction and lr-warmup-iters",
    "--lr-warmup-iters 1000000": "AssertionError",
    "--global-batch-size 12": "must be divisible by",
    "--expert-model-parallel-size 3 --num-experts 3": "not divisible by expert_tensor_model",
    "--no-such-option": "the parser ends with 2",
}


@pytest.mark.parametrize("options", BROKEN)
def test_a_disagreement_is_seen(megatron: Megatron, options: str) -> None:
    plan = resolve(config("model=llama3_8b", "hardware=b200", "layout=ddp")).plan
    assert plan is not None
    answer = megatron.ask(plan, plan.megatron_args + options.split())
    assert BROKEN[options] in str(answer["refused"])


def test_a_change_in_silence_is_seen(megatron: Megatron) -> None:
    """Of an argument that the plan does not give."""
    plan = resolve(config("model=llama3_8b", "hardware=b200", "layout=ddp")).plan
    assert plan is not None
    fewer = [word for word in plan.megatron_args if word != "--no-align-param-gather"]
    assert megatron.ask(plan, fewer) == {
        "refused": None,
        "silent": {"align_param_gather": "True -> False"},
    }


def test_every_exception_is_one(seen: Comparison) -> None:
    """Megatron was seen to let it through; the tests above were run."""
    if seen.outcomes.total() < ENOUGH:
        pytest.skip("it needs the answers of the tests above")
    assert [s for s in STRICTER if s not in seen.stricter] == []


def test_the_plans_are_of_every_kind(seen: Comparison) -> None:
    """So that the agreement is about something."""
    if seen.outcomes.total() < ENOUGH:
        pytest.skip("it needs the answers of the tests above")
    assert {kind for kind in KINDS if not seen.kinds[kind]} == set()
