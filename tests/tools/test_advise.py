"""tools/advise.py: the decision by value, its pages and pictures, and its refusals."""

from __future__ import annotations

import dataclasses
import re
import shlex
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from launch import compose, machine
from planning import decision
from planning.hardware import GIB
from planning.resolve import resolve
from planning.schema import RunConfig
from tests import choices
from tests.choices import CPU
from tools import advise, sizes
from tools.advice_pages import Section

REAL = compose.choose


def choose(words: Sequence[str]) -> RunConfig:
    """Without Hydra, which takes most of the time: tests/test_docs.py runs the real command."""
    return choices.config(*words)


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """A machine without a GPU, wherever the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "look", lambda: CPU)
        patch.setattr(compose, "choose", choose)
        yield


Advice = tuple[decision.Decision, dict[str, Section]]


def advice(*words: str) -> Advice:
    decided, sections = advise.advise(words)
    return decided, {section.title: section for section in sections}


def cells(section: Section) -> list[dict[str, str]]:
    head, *rest = section.table
    return [dict(zip(head, row, strict=True)) for row in rest]


@pytest.fixture(scope="module")
def large() -> Advice:
    return advice("model=gpt_32b", "hardware=p6_b200", "hardware.price_per_node_hour=100")


# ------------------------------------------------------------------ precision


def test_from_14_b_mxfp8_is_taken_beside_bf16_and_nvfp4_is_named(large: Advice) -> None:
    decided, sections = large
    rows = {row["precision"]: row for row in cells(sections["Precision"])}
    assert list(rows) == ["bf16", "fp8", "fp8_blockwise", "fp8_delayed", "mxfp8 (taken)", "nvfp4"]
    base, taken = decided.baseline, decided.taken
    assert base is not None
    assert rows["mxfp8 (taken)"]["tokens/s/GPU"] == f"{taken.rate:,.0f}"
    assert rows["mxfp8 (taken)"]["against BF16"] == f"{taken.rate / base.rate:.2f} x"
    assert rows["bf16"]["MFU, of"].endswith("of 2,250 BF16")
    (why, *_) = sections["Precision"].lines
    assert "MXFP8 is the stable choice" in why
    assert "NVFP4, for the largest models" in why


def test_a_small_model_takes_fp8_and_hopper_says_what_it_lacks() -> None:
    decided, sections = advice("model=gpt_3b", "hardware=h200", "layout.tensor_parallel=1")
    assert decided.taken.name == "fp8"
    assert "least overhead" in sections["Precision"].lines[0]
    said = "\n".join(sections["Precision"].after)
    assert "mxfp8: NVIDIA H200 SXM cannot compute mxfp8" in said
    assert "nvfp4: NVIDIA H200 SXM cannot compute nvfp4" in said
    # Weights kept in FP8 save what a format alone does not.
    held = decided.taken.held
    gathered = re.search(r"same layout needs (\d+) GiB", said)
    assert held is not None
    assert gathered is not None
    assert int(gathered[1]) < held.needed / GIB


def test_a_format_that_does_not_pay_is_not_taken() -> None:
    small = ("model=gpt_160m", "model.seq_length=512", "hardware=h200", "layout=ddp",
             "hardware.gpus_per_node=1", "training.micro_batch_size=1")  # fmt: skip
    given = {name: choices.config(*small, f"precision={name}") for name in ("bf16", "fp8")}
    decided = decision.decide(given, None, 160_000_000)
    assert decided.taken.name == "bf16"
    assert "too little to pay" in decided.why[0]


def test_the_precision_that_was_asked_for_is_kept(large: Advice) -> None:
    given = {one.name: one.config for one in large[0].precisions}
    asked = decision.decide(given, "fp8_delayed", 32_000_000_000)
    assert asked.taken.name == "fp8_delayed"
    assert asked.why[:2] == ["fp8_delayed is what was asked for", "otherwise it would be mxfp8"]


# ------------------------------------------------------------------ the other decisions


def test_batch_sequence_recompute_and_splits_are_compared_with_the_choice(large: Advice) -> None:
    decided, sections = large
    taken = decided.taken
    batches = cells(sections["Batch"])
    assert [row["tokens/s/GPU"] for row in batches if row["against"] == "taken"] == (
        2 * [f"{taken.rate:,.0f}"]
    )
    micro = [row for row in batches if not row["global"]]
    assert [int(row["micro"]) for row in micro] == [2**n for n in range(len(micro))]
    assert micro[-1]["fits"].startswith("no, by ")  # the first that does not fit ends the list
    assert all(row["fits"] in ("yes", "barely") for row in micro[:-1])

    lengths = cells(sections["Sequence length"])
    assert [row["sequence"] for row in lengths] == ["8,192", "16,384", "32,768"]
    assert [row["global batch"] for row in lengths] == ["128", "64", "32"]  # as many tokens
    assert lengths[0]["tokens/s/GPU"] == f"{taken.rate:,.0f}"

    ways = {row["recompute"]: row for row in cells(sections["Checkpointing of activations"])}
    none, full = ways["none"], ways["all blocks"]
    assert int(full["GiB/GPU"]) < int(none["GiB/GPU"])
    assert full["against"].startswith("-")
    best = ways["all blocks, its best layout"]
    assert float(best["tokens/s/GPU"].replace(",", "")) >= float(
        full["tokens/s/GPU"].replace(",", "")
    )

    splits = cells(sections["Sharding"])
    assert [row[""] for row in splits[:5]] == ["1", "2", "3", "4", "5"]
    assert splits[0]["why"] == "taken"
    assert all("% slower: " in row["why"] for row in splits[1:5])
    assert all("too large" in row["why"] for row in splits[5:])


def test_the_figures_add_up(large: Advice) -> None:
    rows = cells(large[1]["Predicted figures, by part"])
    memory = [float(row["GiB"]) for row in rows if row["memory"]]
    assert memory[-1] == pytest.approx(sum(memory[:-1]), abs=0.05)
    step = [float(row["ms"].replace(",", "")) for row in rows if row["step"]]
    assert step[-1] == pytest.approx(sum(step[:-1]), abs=5)
    assert "USD a billion tokens" in "\n".join(large[1]["The choice"].block)


def test_the_commands_to_measure_are_legal_and_are_the_choice(large: Advice) -> None:
    decided, sections = large
    lines = [shlex.split(line) for line in sections["What to measure first"].block]
    runs = [words[2:] for words in lines if words[:2] == ["python", "launch/train.py"]]
    assert len(runs) == 4
    for words in runs:
        for job in compose.combinations([word for word in words if word != "-m"]):
            REAL(job)
    baseline, taken, second, curves = runs
    assert "precision=bf16" in baseline
    assert resolve(REAL(taken)).config.layout == decided.taken.config.layout
    options = decided.taken.options
    assert options
    assert resolve(REAL(second)).config.layout == options.best[1].config.layout
    assert "precision=bf16,mxfp8" in curves


def test_what_leaves_less_than_the_margin_fits_barely(large: Advice) -> None:
    taken = large[0].taken
    assert taken.held is not None
    for share, says in ((0.90, "yes"), (0.97, "barely"), (1.10, "no, by ")):
        hardware = taken.config.hardware.model_copy(
            update={"memory_gib": taken.held.needed / GIB / share}
        )
        other = dataclasses.replace(
            taken, config=taken.config.model_copy(update={"hardware": hardware})
        )
        assert advise._fit(other).startswith(says)


# ------------------------------------------------------------------ pages and refusals


def size_of(picture: Path) -> tuple[int, int]:
    return struct.unpack(">II", picture.read_bytes()[16:24])


def test_a_report_has_the_sections_as_pages_with_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=gpt_8b", "hardware=h100", "layout.tensor_parallel=1", "precision=fp8"]
    assert advise.main([*words, "--report", str(tmp_path / "new" / "advice")]) == 0
    folder = tmp_path / "new" / "advice"
    screen = capsys.readouterr().out
    page, site = (folder / "advice.md").read_text(), (folder / "advice.html").read_text()
    titles = re.findall(r"^(.+)\n-+$", screen, re.MULTILINE)
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == titles
    assert re.findall(r"<h2>(.*?)</h2>", site) == titles
    for name in ("precision", "splits"):
        width, height = size_of(folder / f"{name}.png")
        assert width > height > 300
        assert f"({name}.png)" in page
    assert site.count("data:image/png;base64,") == 2
    assert "<td>bf16</td>" in site


def test_where_nothing_fits_the_nearest_is_shown_and_the_status_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model=llama31_405b", "hardware=h100", "layout=tp8", "layout.recompute=full"]
    assert advise.main(words) == 2
    both = capsys.readouterr()
    assert "None fits" in both.out
    assert "What to measure first" not in both.out
    assert "a run needs" in both.err


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["model=gpt_8b"], 3, "hardware=b200, b300"),
        (["model=gpt_8b", "hardware=cpu"], 2, "advice is about GPUs"),
        (["model=gpt_8b", "hardware=h200", "precision=nvfp4"], 2, "cannot compute nvfp4"),
        (["model=gpt_8b", "hardware=h200", "precision=fp32"], 2, "precision"),
        (["model=gpt_8b", "hardware=h200", "layout.tensor_parallel=3"], 2, "tensor_parallel"),
    ],
)
def test_a_choice_that_is_wrong_is_refused_as_by_a_launch(
    words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise.main(words) == status
    both = capsys.readouterr()
    assert says in both.err
    assert both.out == ""


def test_words_that_are_unknown_are_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, says in (
        (["modle=gpt_8b"], "did you mean model?"),
        (["model=gpt_8b", "hardware=p6_b20"], "did you mean p6_b200?"),
        (["hardware=h100", "precision=mxfp"], "did you mean mxfp8?"),
        (["hardware=h100", "precision="], "choose from"),
        (["model"], "model"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compose, "choose", REAL)
            assert advise.main(words) == 2
        assert says in capsys.readouterr().err


# ------------------------------------------------------------------ docs/sizes.md


def test_the_tables_of_sizes_are_complete_and_current() -> None:
    text = sizes.PAGE.read_text()
    tables = re.findall(r"^### One (\w+), sequences of ([\d,]+)\n\n(.*?)\n(?:\n|$)", text,
                        re.MULTILINE | re.DOTALL)  # fmt: skip
    assert len(tables) == len(sizes.HARDWARE) * len(sizes.SEQUENCES)
    shown: Callable[[str], list[str]] = lambda line: [c.strip() for c in line.split("|")[1:-1]]  # noqa: E731
    found = {
        (hardware, int(length.replace(",", "")), *row[:2]): row
        for hardware, length, body in tables
        for row in map(shown, body.splitlines()[2:])
    }
    assert len(found) == len(tables) * len(sizes.MODELS) * len(sizes.PRECISIONS)
    for hardware, length, model, precision in (
        ("p6_b200", 8192, "gpt_8b", "fp8"),
        ("p6_b200", 32768, "gpt_32b", "nvfp4"),
        ("p6_b300", 8192, "gpt_64b", "mxfp8"),
    ):
        base = sizes.planned(model, "bf16", hardware, length)
        row = sizes.Row(model, precision, sizes.planned(model, precision, hardware, length), base)
        assert found[hardware, length, model, precision] == row.cells(), "python tools/sizes.py"
