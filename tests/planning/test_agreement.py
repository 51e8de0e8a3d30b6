"""What planning calls legal, the installed Megatron accepts, and changes nothing of it.

Asked in one process: megatron.training.arguments parse_args and validate_args, the configurations
that Megatron makes of them, and training/arguments.py's own comparison (tests/planning/
ask_megatron.py). Plans are those of the product of conf/'s models, precisions, layouts and
hardware, and of random settings beyond it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from planning.findings import errors
from planning.hardware import GPUS
from planning.plan import Plan
from planning.resolve import resolve
from planning.schema import RunConfig
from tests.choices import ROOT, config, product
from tests.planning.test_rules import EXAMPLES, Example

SAMPLED = 8_000  # of the product's 40,000 choices, and as many with random settings
# Values that settings take at random, with each other.
SETTINGS: dict[str, dict[str, list[object]]] = {
    "layout": {
        "tensor_parallel": [1, 2, 4, 8],
        "pipeline_parallel": [1, 1, 2, 4],
        "virtual_pipeline_parallel": [1, 1, 2],
        "context_parallel": [1, 1, 2],
        "expert_parallel": [1, 1, 2, 4],
        "sequence_parallel": [True, False],
        "sharding": ["none", "optimizer", "fsdp", "fsdp2"],
        "fsdp_strategy": ["optim", "optim_grads", "optim_grads_params", "optim_grads_params"],
        "overlap": [True, False],
        "recompute": ["none", "selective", "full"],
        "recompute_layers": [None, None, 2],
        "recompute_modules": [["core_attn"], ["mlp"], ["moe", "core_attn"], ["layernorm"]],
    },
    "precision": {
        "param_gather": [True, False],
        "gradients": ["fp32", "bf16"],
        "optimizer_moments": ["fp32", "fp32", "bf16", "fp8"],
        "layers_in_bf16_at_start": [0, 0, 1],
        "layers_in_bf16_at_end": [0, 0, 2, "10%"],
    },
    "model": {
        "tied_embeddings": [True, False],
        "qk_norm": [True, False],
        "kv_channels": [None, 64],
    },
    "hardware": {"nodes": [1, 2, 4], "allow_unfused_attention": [True, False]},
    "training": {"check_nan": [True, False], "global_batch_size": [128, 256]},
    "checkpoint": {"save": [True, False]},
}


@dataclass(frozen=True)
class Case:
    choice: str
    question: str  # JSON, as ask_megatron.py reads it


@dataclass(frozen=True)
class Answers:
    legal: dict[Case, str | None]
    broken: dict[Case, str | None]  # BROKEN's
    illegal: dict[Example, str | None]  # that planning refuses
    silent: dict[str, list[str]]


def question(plan: Plan, arguments: list[str] | None = None) -> str:
    return json.dumps(
        {
            "arguments": arguments or plan.megatron_args,
            "environment": plan.environment,
            "world_size": plan.derived.world_size,
            "capability": GPUS[plan.config.hardware.gpu or "cpu"].compute_capability,
        }
    )


def legal(choices: Iterable[tuple[str, RunConfig]]) -> list[Case]:
    """The different plans of what is legal, whether or not it fits in memory."""
    found = {}
    for choice, chosen in choices:
        resolution = resolve(chosen)
        wrong = {finding.id for finding in errors(resolution.findings)} - {"state-memory"}
        if resolution.plan is not None and not wrong:
            asked = question(resolution.plan)
            found[asked] = Case(choice, asked)
    return list(found.values())


def varied(
    choices: list[tuple[str, RunConfig]], draw: random.Random
) -> Iterator[tuple[str, RunConfig]]:
    """The choices with random settings."""
    for choice, chosen in choices:
        line, parts = [choice], {}
        for group, table in SETTINGS.items():
            # A part of them, so that choices of a group stay themselves often enough.
            taken = {
                name: draw.choice(values) for name, values in table.items() if draw.random() < 0.4
            }
            line += [f"{group}.{name}={value}" for name, value in taken.items()]
            parts[group] = getattr(chosen, group).model_copy(update=taken)
        yield " ".join(line), chosen.model_copy(update=parts)


# Options added to a legal plan -> what Megatron says.
BROKEN = {
    "--sequence-parallel": "Megatron turns --sequence-parallel True into False",
    "--num-attention-heads 30 --tensor-model-parallel-size 4": "must be a multiple of",
    "--lr-warmup-fraction 0.1": "can only specify one of lr-warmup-fraction and lr-warmup-iters",
    "--no-such-option": "the parser ends with 2",
}


def broken() -> list[Case]:
    plan = resolve(config("model=llama3_8b", "hardware=b200", "layout=ddp")).plan
    assert plan is not None
    return [Case(words, question(plan, plan.megatron_args + words.split())) for words in BROKEN]


def illegal() -> dict[Example, Case]:
    """The examples of rules, as far as they can be planned at all."""
    found = {}
    for example in EXAMPLES:
        resolution = resolve(config(*f"{example.common} {example.breaks}".split()))
        if resolution.plan is not None:
            found[example] = Case(str(example), question(resolution.plan))
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    started = time.monotonic()
    draw = random.Random(0)
    every = list(product())
    groups = [
        legal(draw.sample(every, SAMPLED)) + legal(varied(draw.choices(every, k=SAMPLED), draw)),
        broken(),
    ]
    examples = illegal()
    asked = [case for group in groups for case in group] + list(examples.values())
    file: Path = tmp_path_factory.mktemp("agreement") / "plans.jsonl"
    file.write_text("\n".join(case.question for case in asked))
    planned = time.monotonic() - started
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.ask_megatron", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *said, silent = map(json.loads, done.stdout.splitlines())
    took = time.monotonic() - started - planned
    print(
        f"\n{2 * SAMPLED:,} choices resolved in {planned:.0f} s, {len(groups[0]):,} different "
        f"legal plans; Megatron asked about {len(asked):,} in {took:.0f} s"
    )
    answers = iter(said)
    legal_said, broken_said = (dict(zip(group, answers, strict=False)) for group in groups)
    return Answers(legal_said, broken_said, dict(zip(examples, answers, strict=True)), silent)


def test_megatron_takes_every_legal_plan_as_it_is(answers: Answers) -> None:
    assert len(answers.legal) > SAMPLED / 8
    refused = {case: answer for case, answer in answers.legal.items() if answer is not None}
    kinds = Counter(refused.values()).most_common(9)
    examples = "\n".join(f"{answer}\n    {case.choice}" for case, answer in refused.items())
    assert not refused, f"{len(refused)} refused: {kinds}\n{examples[:5000]}"


def test_megatron_turns_no_other_argument(answers: Answers) -> None:
    """Not even one that the plan leaves to Megatron: what it would force stands in the plan."""
    assert answers.silent == {}


def test_a_disagreement_is_seen(answers: Answers) -> None:
    for (case, answer), expected in zip(answers.broken.items(), BROKEN.values(), strict=True):
        assert expected in str(answer), case.choice


def test_rules_say_rightly_what_megatron_checks_itself(answers: Answers) -> None:
    """All others are ours: what Megatron finds later, or never."""
    assert sum(answer is not None for answer in answers.illegal.values()) > 15
    for example, answer in answers.illegal.items():
        assert (answer is not None) == example.by_megatron, f"{example}: {answer}"


def test_the_plans_are_of_every_kind(answers: Answers) -> None:
    """So that the agreement is about something."""
    words = Counter(
        word for case in answers.legal for word in json.loads(case.question)["arguments"]
    )
    for option in (
        *("--use-megatron-fsdp", "--use-torch-fsdp2", "--use-distributed-optimizer"),
        *("--sequence-parallel", "--fp8-param-gather", "--fp4-format", "--num-experts"),
        *("--recompute-modules", "--fp16", "--qk-layernorm", "--overlap-param-gather"),
        *("--use-precision-aware-optimizer", "--reuse-grad-buf-for-mxfp8-param-ag"),
    ):
        assert words[option] >= 5, option
