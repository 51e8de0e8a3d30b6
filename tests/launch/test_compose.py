"""Every choice composes, and every combination is legal or says why not."""

from __future__ import annotations

import itertools
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from launch import compose
from planning import changes
from planning.findings import ChoiceError, Finding, errors
from planning.resolve import resolve
from planning.schema import RunConfig
from tests.choices import combine, config, line, product, values

GROUPS = {group: compose.choices(group) for group in compose.groups() if group != "local"}
EVERY = [f"{group}={choice}" for group, choices in GROUPS.items() for choice in choices]


@pytest.mark.parametrize("word", EVERY)
def test_every_choice_composes(word: str) -> None:
    """Through Hydra; what the tests read from the files without it is the same."""
    group, _, choice = word.partition("=")
    chosen = compose.choose([word])
    if group in RunConfig.model_fields:
        assert getattr(getattr(chosen, group), "name", choice) == choice
        assert chosen == compose.from_values(values(word))


@pytest.mark.parametrize(
    "line",
    [
        "model=moe_8x1b precision=bench/mxfp8 layout=ep8 hardware=p6_b200 data=mock launch=plan",
        "model=qwen3_32b layout.tensor_parallel=4 training.optimizer.learning_rate=1e-4",
        "hardware=b300 hardware.nodes=4 run_dir=runs/x resume=none checkpoint.save=false",
        'precision=nvfp4 precision.layers_in_bf16_at_end="20%" layout.recompute_modules=[mlp,moe]',
        "training.train_steps=7 model.recipe.global_batch_size=32 model.kv_channels=null",
    ],
)
def test_files_read_without_hydra_give_its_composition(line: str) -> None:
    words = line.split()
    assert compose.from_values(values(*words)) == compose.choose(words)


def test_an_experiment_sets_other_groups() -> None:
    plain, chosen = compose.choose([]), compose.choose(["experiment=compare_precision"])
    assert (plain.training.train_steps, chosen.training.train_steps) == (200, 500)
    assert chosen.checkpoint.save is False
    # Words come after it.
    words = ["experiment=compare_precision", "training.train_steps=3"]
    assert compose.choose(words).training.train_steps == 3


def test_a_model_brings_its_training_and_words_change_it() -> None:
    chosen = compose.choose(["model=gpt_1b", "training.global_batch_size=64"])
    assert chosen.training.global_batch_size == 64
    assert chosen.training.train_steps == chosen.model.recipe.train_steps == 24_000
    assert chosen.training.optimizer.warmup_steps == "2%"


def test_a_file_with_a_slip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(compose.CONF, tmp_path / "conf")
    monkeypatch.setattr(compose, "CONF", tmp_path / "conf")
    file = tmp_path / "conf/model/gpt_mine.yaml"
    good = (compose.CONF / "model/gpt_1b.yaml").read_text()
    file.write_text(good.replace("num_layers: 16", "num_layers: 16\n  hidden_size: 5"))
    assert f'in "{file}", line' in refusal("model=gpt_mine").message
    file.write_text(good.replace("qk_norm: false\n", ""))
    found = refusal("model=gpt_mine")
    assert (found.setting, found.message) == ("model.qk_norm", "it has no value")
    assert found.fix == "take true or false"
    file.write_text(good + "qk_nrom: true\n")
    found = refusal("model=gpt_mine")
    assert found.setting == "model.qk_nrom"
    assert found.message.endswith("did you mean model.qk_norm?")
    # Other groups refer to a model's recipe: the error is where the value lacks, not there.
    file.write_text(good.partition("recipe:")[0])
    assert refusal("model=gpt_mine").setting == "model.recipe"
    file.write_text("")
    found = refusal("model=gpt_mine")
    assert (found.setting, found.message[:33]) == ("model", "22 of its settings have no value:")
    assert found.fix == "start from another file of conf/model/"
    file.write_bytes(good.encode("utf-16"))
    assert refusal("model=gpt_mine").message == f"{file} is no text in UTF-8"


def refusal(*words: str) -> Finding:
    with pytest.raises(ChoiceError) as caught:
        compose.choose(words)
    (finding,) = caught.value.findings
    return finding


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("precision=bench/fp9", "bench/fp8"),
        ("precision=bench_mxfp8", "bench/mxfp8"),
        ("model=gpt_33b", "gpt_3b"),
        ("hardware=p6-b200", "p6_b200"),
        ("launch=plann", "plan"),
        ("experiment=compare_precison", "compare_precision"),
    ],
)
def test_an_unknown_choice_names_the_nearest_and_all(word: str, nearest: str) -> None:
    group, _, choice = word.partition("=")
    found = refusal(word)
    assert found.setting == group
    assert found.message == f"there is no {choice!r}; did you mean {nearest}?"
    assert found.fix == f"choose from {', '.join(GROUPS[group])}"


def test_every_combination_is_legal_or_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """model x precision x layout x hardware, resolved from the files; auto in the test below."""
    # What would make thousands of choices fit, and their micro batch, are for other tests.
    monkeypatch.setattr(changes, "that_fit", lambda _: [])
    started = time.monotonic()
    verdicts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    legal: dict[str, set[str]] = {group: set() for group in ("model", "precision", "layout",
                                                             "hardware")}  # fmt: skip
    for groups in product():
        if groups["layout"] == "auto":
            continue
        words, resolution = line(groups), resolve(with_micro_batch(combine(groups)))
        found = errors(resolution.findings)
        reasons.update({finding.id for finding in found})
        for finding in found:
            assert all((finding.setting, finding.message, finding.fix)), words
        if not found:
            assert resolution.plan is not None, words
            assert resolution.states is not None, words
        kinds = {finding.id for finding in found}
        fits = not kinds or kinds == {"memory"}
        verdict = "legal" if not kinds else "too large" if fits else "illegal"
        verdicts[verdict] += 1
        if fits:
            for group, choice in groups.items():
                legal[group].add(choice)
    total = sum(verdicts.values())
    with capsys.disabled():
        print(f"\n{total:,} combinations in {time.monotonic() - started:.0f} s: {dict(verdicts)}")
        print("reasons: " + ", ".join(f"{id} {n:,}" for id, n in reasons.most_common()))
    sizes = [len(GROUPS[group]) for group in legal]
    assert total == sizes[0] * sizes[1] * (sizes[2] - 1) * sizes[3]
    # No choice is there in vain: only a layout of 32 ranks is legal nowhere on one node.
    assert {group: set(GROUPS[group]) - found for group, found in legal.items()} == {
        "model": set(),
        "precision": set(),
        "layout": {"auto", "tp8_pp4"},
        "hardware": set(),
    }
    four = config("model=llama3_70b", "layout=tp8_pp4", "hardware=p6_b200", "hardware.nodes=4")
    assert errors(resolve(four).findings) == []
    assert verdicts["legal"] > total / 10


def with_micro_batch(config: RunConfig) -> RunConfig:
    if config.training.micro_batch_size is not None:
        return config
    training = config.training.model_copy(update={"micro_batch_size": 1})
    return config.model_copy(update={"training": training})


def test_auto_finds_a_layout_or_says_why() -> None:
    """Every model on every hardware, each with another precision."""
    precisions = itertools.cycle(GROUPS["precision"])
    verdicts: Counter[str] = Counter()
    for model, hardware in itertools.product(GROUPS["model"], GROUPS["hardware"]):
        groups = {"model": model, "precision": next(precisions), "layout": "auto",
                  "hardware": hardware}  # fmt: skip
        resolution = resolve(combine(groups))
        found = errors(resolution.findings)
        verdicts["legal" if not found else "refused"] += 1
        assert all(finding.setting and finding.message and finding.fix for finding in found)
        if not found:
            assert resolution.plan is not None, line(groups)
            layout = resolution.config.layout
            assert None not in (layout.tensor_parallel, layout.sharding, layout.recompute)
            assert resolution.config.training.micro_batch_size is not None
    assert verdicts["legal"] > 60
