"""Counts and formulas. tests/models/test_build.py compares the counts with built models."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from planning.findings import ChoiceError, Finding
from planning.formulas import evaluate, fields
from planning.parameters import RankParameters, count, padded_vocab_size, per_rank
from planning.pattern import blocks
from planning.schema import ModelConfig

CONF = Path(__file__).resolve().parents[2] / "conf/model"


def chosen(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**yaml.safe_load((CONF / f"{name}.yaml").read_text()) | changes)


def total(model: ModelConfig) -> int:
    counted = count(model)
    assert counted is not None
    return counted.total


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt_1b", 1_235_814_400),  # Llama-3.2-1B
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama31_405b", 405_853_388_800),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_32b", 32_762_123_264),
    ],
)
def test_named_models_have_their_published_size(name: str, published: int) -> None:
    assert total(chosen(name)) == published


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt_160m", 0.16),
        ("gpt_3b", 3),
        ("gpt_8b", 8),
        ("gpt_14b", 14),
        ("gpt_32b", 32),
        ("gpt_64b", 64),
    ],
)
def test_a_size_in_a_name_is_true_within_5_percent(name: str, billions: float) -> None:
    assert total(chosen(name)) == pytest.approx(billions * 1e9, rel=0.05)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_file_says_its_exact_size(path: Path) -> None:
    text = path.read_text()
    comment = " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))
    assert f"{total(chosen(path.stem)):,}" in comment


@pytest.mark.parametrize(
    ("vocabulary", "padded"),
    [(257, 384), (384, 384), (1, 128), (32000, 32000), (128256, 128256), (151936, 151936)],
)
def test_the_vocabulary_is_padded_to_128(vocabulary: int, padded: int) -> None:
    assert padded_vocab_size(chosen("gpt_tiny", vocab_size=vocabulary)) == padded


def test_a_tiny_model_by_hand() -> None:
    """2 blocks of hidden 128, ffn 384, 4 heads and 2 groups of 32, 257 words of 384, tied."""
    attention = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128 + 128
    mlp = 3 * 128 * 384 + 128
    counted = count(chosen("gpt_tiny"))
    assert counted is not None
    assert counted.per_block == (attention + mlp, attention + mlp)
    assert (counted.embedding, counted.output, counted.final_norm) == (384 * 128, 0, 128)
    assert counted.total == 257 * 128 + 2 * (attention + mlp) + 128
    assert counted.total_padded - counted.total == (384 - 257) * 128
    untied = count(chosen("gpt_tiny", tied_embeddings=False))
    assert untied is not None
    assert untied.total - counted.total == 257 * 128
    assert untied.output == 384 * 128


def test_active_parameters_leave_out_the_experts_that_a_token_is_not_sent_to() -> None:
    model = chosen("moe_tiny")  # 2 of 4 experts of 3 x 128 x 192 in each of 2 blocks
    counted = count(model)
    assert counted is not None
    assert counted.total - counted.active_per_token == 2 * (4 - 2) * 3 * 128 * 192
    dense = count(chosen("gpt_tiny"))
    assert dense is not None
    assert dense.total == dense.active_per_token


def test_experts_without_their_shape_are_refused() -> None:
    with pytest.raises(ChoiceError, match=r"model\.num_experts.* is not set"):
        count(chosen("gpt_tiny", pattern="*E"))
    with pytest.raises(ChoiceError, match="8 experts a token of 4"):
        count(chosen("moe_tiny", experts_per_token=8))


def test_a_layer_that_the_stack_lacks_is_refused() -> None:
    with pytest.raises(ChoiceError, match="the stack transformer has no layer for 'M'"):
        count(chosen("gpt_tiny", pattern="M-"))


def test_a_rank_holds_its_share() -> None:
    """Norms are on all tensor parallel ranks, experts are divided by their own degrees."""
    model = chosen("moe_tiny")
    stage = blocks(model.pattern, model.num_layers)
    attention, table, expert = 128 * 8 * 32 + 4 * 32 * 128, 384 * 128, 3 * 128 * 192
    replicated = 2 * (128 + 128 + 4 * 128)  # two norms and the router in each block
    assert per_rank(model, stage) == RankParameters(
        table + 2 * attention + replicated + 128, 2 * 4 * expert
    )
    assert per_rank(
        model, stage, tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=1
    ) == RankParameters((table + 2 * attention) // 2 + replicated + 128, 2 * 2 * expert)
    assert per_rank(
        model, stage[:1], tensor_parallel=2, embedding=False, output=False
    ) == RankParameters(attention // 2 + replicated // 2, 2 * expert)


def test_tied_embeddings_are_two_tables_in_a_pipeline() -> None:
    model, table = chosen("gpt_tiny"), 384 * 128

    def held(embedding: bool, output: bool) -> int:
        rank = per_rank(model, ["*-"], embedding=embedding, output=output)
        assert rank is not None
        return rank.total

    middle = held(False, False)
    assert held(True, True) - middle == table + 128
    assert held(True, False) - middle == table
    assert held(False, True) - middle == table + 128


FORMULAS = {
    "parameters": "2 * hidden_size**2 + ffn_hidden_size",
    "flops": "4 * hidden_size**2",
    "activation_bytes": "2 * hidden_size",
}


def test_an_unknown_stack_counts_by_its_formulas() -> None:
    model = chosen("gpt_tiny", stack="mine", formulas=FORMULAS)
    counted = count(model)
    assert counted is not None
    assert counted.per_block == (2 * 128**2 + 384,) * 2
    assert counted.total == 257 * 128 + 2 * (2 * 128**2 + 384) + 128
    assert per_rank(model, ["*-"], tensor_parallel=4) == RankParameters(
        384 * 128 // 4 + (2 * 128**2 + 384) // 4 + 128, 0
    )


def test_an_unknown_stack_without_formulas_is_not_estimated() -> None:
    model = chosen("gpt_tiny", stack="mine")
    assert count(model) is None
    assert per_rank(model, ["*-"]) is None


def test_half_a_parameter_is_refused() -> None:
    formulas = FORMULAS | {"parameters": "hidden_size / 3"}
    with pytest.raises(ChoiceError, match="no whole number"):
        count(chosen("gpt_tiny", stack="mine", formulas=formulas))


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("1 + 2 * 3", 7),
        ("-2 + hidden_size / 3 * 3", 126),
        ("hidden_size // 100 + 0.5", Fraction(3, 2)),
        ("min(hidden_size, 5, 7) + max(1, 2)", 7),
        ("ceil(hidden_size / 100)", 2),
        ("2**2**2 / 2", 8),
        ("kv_channels", 32),  # null in the file: hidden_size / num_attention_heads
        ("\n  hidden_size\n  + 1\n", 129),
        ("norm_epsilon * 100000", 1),
    ],
)
def test_a_formula_is_exact_arithmetic(formula: str, value: Fraction | int) -> None:
    assert evaluate(formula, fields(chosen("gpt_tiny")), "model.formulas.flops") == value


def refusal(formula: str) -> Finding:
    with pytest.raises(ChoiceError) as refused:
        evaluate(formula, fields(chosen("gpt_tiny")), "model.formulas.flops")
    (finding,) = refused.value.findings
    assert finding.setting == "model.formulas.flops"
    assert finding.fix
    return finding


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (
            "hiden_size * 2",
            "hiden_size is no numeric field of this model; did you mean hidden_size?",
        ),
        ("num_experts * 2", "num_experts is no numeric field"),  # null
        ("pattern", "pattern is no numeric field"),
        ("__import__('os').system('true')", "is not arithmetic"),
        ("hidden_size.real", "hidden_size.real is not arithmetic"),
        ("open('x')", "open('x') is not arithmetic"),
        ("'text'", "'text' is not arithmetic"),
        ("True", "True is not arithmetic"),
        ("[1][0]", "is not arithmetic"),
        ("hidden_size if 1 else 2", "is not arithmetic"),
        ("ceil(1, 2)", "ceil(1, 2) is not arithmetic"),
        ("min(1)", "min(1) is not arithmetic"),
        ("2 *", "not an expression"),
        ("", "not an expression"),
        ("1 / (hidden_size - 128)", "hidden_size - 128 is zero"),
        ("9**9**9", "the exponent 9 is too much"),
        ("2**-1", "the exponent -1 is too much"),
        ("1 - hidden_size", "it gives -127, below zero"),
    ],
)
def test_anything_else_is_refused_by_name(formula: str, message: str) -> None:
    assert message in refusal(formula).message
