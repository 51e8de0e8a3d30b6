from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.findings import ChoiceError, Finding
from planning.pattern import (
    blocks,
    split_stages,
    stages,
    symbols,
    symbols_in_first_blocks,
    symbols_in_last_blocks,
)


def refusal(pattern: str, num_layers: int) -> Finding:
    with pytest.raises(ChoiceError) as refused:
        blocks(pattern, num_layers)
    (finding,) = refused.value.findings
    return finding


@pytest.mark.parametrize(
    ("pattern", "num_layers", "expected"),
    [
        ("*-", 3, ["*-", "*-", "*-"]),
        ("*", 2, ["*", "*"]),
        ("*E*-", 4, ["*E", "*-", "*E", "*-"]),
        ("G-G-G-*-", 4, ["G-", "G-", "G-", "*-"]),
        ("MM*-", 3, ["M", "M", "*-"]),
        ("D-+E", 2, ["D-", "+E"]),
    ],
)
def test_a_block_is_a_mixer_and_the_feed_forward_after_it(
    pattern: str, num_layers: int, expected: list[str]
) -> None:
    assert blocks(pattern, num_layers) == expected
    assert symbols(pattern, num_layers) == "".join(expected)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*x", "'x' (symbol 2 of '*x') stands for no layer"),
        ("*-|*-", "'|' (symbol 3 of '*-|*-') stands for no layer"),
        ("-*", "'-' (symbol 1 of '-*') has no mixer before it"),
        ("*-E", "'E' (symbol 3 of '*-E') has no mixer before it"),
        ("", "it is empty"),
        ("*-D-", "mixes attention with D or +"),
    ],
)
def test_an_impossible_pattern_is_explained(pattern: str, message: str) -> None:
    finding = refusal(pattern, 4)
    assert finding.setting == "model.pattern"
    assert message in finding.message
    assert finding.fix


def test_the_legal_symbols_are_named() -> None:
    fix = refusal("*?", 1).fix
    for symbol in "*GMD+-E":
        assert f"`{symbol}`" in fix


@pytest.mark.parametrize(
    ("num_layers", "legal"), [(10, "take 8 or 12"), (3, "take 4, or"), (1, "take 4, or")]
)
def test_a_broken_period_names_the_nearest_number_of_layers(num_layers: int, legal: str) -> None:
    finding = refusal("G-G-G-*-", num_layers)
    assert finding.setting == "model.num_layers"
    assert finding.fix.startswith(legal)


@pytest.mark.parametrize(
    ("num_layers", "count", "lengths"),
    [
        (16, 4, [4, 4, 4, 4]),
        (32, 5, [6, 6, 7, 7, 6]),
        (6, 4, [1, 2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (5, 2, [3, 2]),
        (126, 8, [15, 16, 16, 16, 16, 16, 16, 15]),
        (3, 3, [1, 1, 1]),
        (4, 1, [4]),
    ],
)
def test_the_first_and_the_last_stage_get_the_fewer_blocks(
    num_layers: int, count: int, lengths: list[int]
) -> None:
    assert [len(stage) for stage in stages(["*-"] * num_layers, count)] == lengths


def test_a_pipe_stands_between_stages() -> None:
    assert split_stages(blocks("G-*E", 4), 2) == "G-*E|G-*E"
    assert split_stages(["*-", "*", "*-"], 3) == "*-|*|*-"


@given(st.integers(1, 130), st.integers(1, 40))
def test_stages_hold_all_blocks_in_order_and_differ_by_one_at_most(length: int, count: int) -> None:
    named = [f"block {i}" for i in range(length)]
    if count > length:
        with pytest.raises(ChoiceError, match=f"at most {length} segments"):
            stages(named, count)
        return
    found = stages(named, count)
    assert [block for stage in found for block in stage] == named
    lengths = [len(stage) for stage in found]
    assert len(lengths) == count
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] >= lengths[-1] == min(lengths)


def test_blocks_in_bf16_become_megatrons_layers() -> None:
    found = ["*-", "*-", "M", "*E"]
    assert [symbols_in_first_blocks(found, n) for n in range(6)] == [0, 2, 4, 5, 7, 7]
    assert [symbols_in_last_blocks(found, n) for n in range(6)] == [0, 2, 3, 5, 7, 7]
