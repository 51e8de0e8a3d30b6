"""The page docs/sizes.md: what a plan predicts for each size of model on one Blackwell node.

python tools/sizes.py    writes its tables anew, in two minutes
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch import compose
from planning import report
from planning.decision import Alternative, changed
from planning.resolve import resolve
from tools.advice_pages import markdown_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sizes.md"
MARK = "<!-- From here on by tools/sizes.py. -->"
MODELS = ("gpt_1b", "gpt_3b", "gpt_8b", "gpt_14b", "gpt_32b", "gpt_64b")
SMALL = MODELS[:4]  # to about 14 B parameters
HARDWARE = ("p6_b200", "p6_b300")
PRECISIONS = ("bf16", "fp8", "fp8_delayed", "fp8_blockwise", "mxfp8", "nvfp4")
SEQUENCES = {8192: 128, 32768: 32}  # tokens -> sequences a step: 1.05 M tokens in both
HEAD = ("model", "precision", "tokens/s/GPU", "to BF16", "MFU", "of", "GiB/GPU", "layout",
        "recompute")  # fmt: skip


@dataclass(frozen=True)
class Row:
    model: str
    precision: str
    found: Alternative
    base: Alternative  # BF16, in its own layout

    @property
    def gain(self) -> float:
        return self.found.rate / self.base.rate

    def cells(self) -> list[str]:
        one = self.found
        if one.held is None or one.speed is None or not one.fits:
            return [self.model, self.precision, *[""] * 6, "nothing fits"]
        layout = report.layout_words(one.config, one.facts.data_parallel)
        return [
            self.model,
            self.precision,
            f"{one.rate:,.0f}",
            "" if one is self.base else f"{self.gain:.2f}",
            f"{one.speed.mfu:.0%}",
            f"{one.speed.mfu_peak_tflops:,.0f}",
            f"{one.held.needed / report.GIB:.0f}",
            layout.partition(", recompute")[0],
            report.recompute_words(one.config.layout),
        ]


def planned(model: str, precision: str, hardware: str, length: int, *more: str) -> Alternative:
    words = [f"model={model}", f"precision={precision}", f"hardware={hardware}"]
    words += [f"model.seq_length={length}", f"training.global_batch_size={SEQUENCES[length]}"]
    found = resolve(compose.choose([*words, *more]))
    return Alternative(precision, found.config, found.held, found.speed)


def rows(hardware: str, length: int, models: Iterable[str] = MODELS) -> list[Row]:
    made = []
    for model in models:
        base = planned(model, "bf16", hardware, length)
        for precision in PRECISIONS:
            one = base if precision == "bf16" else planned(model, precision, hardware, length)
            made.append(Row(model, precision, one, base))
    return made


def sharded_alone(model: str) -> list[str]:
    """GiB with Megatron-FSDP over the node, in BF16 and without recompute, by micro batch."""
    words = ("layout=fsdp", "layout.recompute=none", "training.micro_batch_size=1")
    one = planned(model, "bf16", "p6_b200", 8192, *words)
    cells = [model]
    for size in (1, 2, 4, 8):
        other = changed(one, str(size), training__micro_batch_size=size)
        assert other is not None
        assert other.held is not None
        gib = f"{other.held.needed / report.GIB:,.0f}"
        cells.append(f"**{gib}**" if other.fits else gib)
    return cells


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/sizes.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.parse_args(words)
    words_of_page = PAGE.read_text().partition(MARK)[0]
    every = {(hw, n): rows(hw, n) for hw in HARDWARE for n in SEQUENCES}
    PAGE.write_text(words_of_page + MARK + "\n\n" + tables(every))
    return 0


def tables(every: Mapping[tuple[str, int], list[Row]]) -> str:
    flat = [row for found in every.values() for row in found]
    alone = [["BF16, GiB", *(f"MBS {n}" for n in (1, 2, 4, 8))], *map(sharded_alone, MODELS)]
    parts = [
        ("Layouts that recompute", _recomputing(flat)),
        ("Megatron-FSDP alone, without recompute", alone),
        ("Speed against BF16: least to most, and the median", _gaining(flat)),
    ]
    for (hardware, length), found in every.items():
        title = f"One {hardware}, sequences of {length:,}"
        parts.append((title, [list(HEAD), *(row.cells() for row in found)]))
    pieces = ["\n".join([f"### {title}", "", *markdown_table(cells)]) for title, cells in parts]
    return "\n\n".join(pieces) + "\n"


def _share(found: list[Row]) -> str:
    again = [row for row in found if row.found.config.layout.recompute != "none"]
    return f"{len(again)} of {len(found)}"


def _gains(found: list[Row], precision: str) -> str:
    gains = [row.gain for row in found if row.precision == precision]
    return f"{min(gains):.2f} to {max(gains):.2f} ({statistics.median(gains):.2f})"


def _parts(flat: list[Row]) -> list[tuple[str, list[Row]]]:
    small = [row for row in flat if row.model in SMALL]
    return [("to 14 B", small), ("32 B and 64 B", [row for row in flat if row not in small])]


def _recomputing(flat: list[Row]) -> list[list[str]]:
    cells = [["", *(f"{length:,}" for length in SEQUENCES)]]
    for name, found in _parts(flat):
        by_length = ([row for row in found if row.found.config.model.seq_length == length]
                     for length in SEQUENCES)  # fmt: skip
        cells.append([name, *map(_share, by_length)])
    return cells


def _gaining(flat: list[Row]) -> list[list[str]]:
    parts = _parts(flat)
    cells = [["", *(name for name, _ in parts)]]
    return cells + [[p, *(_gains(found, p) for _, found in parts)] for p in PRECISIONS[1:]]


if __name__ == "__main__":
    sys.exit(main())
