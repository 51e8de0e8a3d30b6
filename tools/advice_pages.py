"""What tools/advise.py says: as text, and as a Markdown and an HTML page with pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planning import report
from planning.decision import Decision
from planning.memory import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    LOSS,
    OPTIMIZER,
    QUANTISED,
    RECOMPUTED,
    WEIGHTS,
    Estimate,
)
from planning.search import SHOWN

DPI = 130
# Memory by part, from what is always there to what a micro batch adds; Okabe and Ito's colours,
# which the colour-blind tell apart.
COLOURS = {
    WEIGHTS: "#0072B2",
    QUANTISED: "#56B4E9",
    GRADIENTS: "#009E73",
    OPTIMIZER: "#F0E442",
    GATHERED: "#999999",
    ACTIVATIONS: "#E69F00",
    RECOMPUTED: "#D55E00",
    LOSS: "#CC79A7",
}
REST, REST_COLOUR = "context, libraries, NCCL", "#444444"
TAKEN, OTHER, TOO_LARGE = "#1f5fa8", "#9db8d6", "#e0a79b"


@dataclass(frozen=True)
class Section:
    """Lines, a table whose first row is its head, lines after it, and a block of code."""

    title: str
    lines: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    after: Sequence[str] = ()
    block: Sequence[str] = ()
    picture: str = ""  # a key of `pictures`


def text(sections: Sequence[Section]) -> str:
    parts = []
    for section in sections:
        lines = [section.title, "-" * len(section.title), *section.lines]
        if len(section.table) > 1:
            lines += ["", *report.table([list(row) for row in section.table])]
        if section.after:
            lines += ["", *section.after]
        if section.block:
            lines += ["", *section.block]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def write(folder: Path, title: str, sections: Sequence[Section], decided: Decision) -> list[Path]:
    """advice.md and advice.html with their pictures. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {name: folder / f"{name}.png" for name in pictures(decided, folder)}
    page, site = folder / "advice.md", folder / "advice.html"
    page.write_text(_markdown(title, sections, images))
    site.write_text(_html(title, sections, images))
    return [page, site, *images.values()]


def _markdown(title: str, sections: Sequence[Section], images: dict[str, Path]) -> str:
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += section.lines
        if len(section.table) > 1:
            parts.append("\n".join(markdown_table(section.table)))
        parts += section.after
        if section.block:
            parts.append("\n".join(["```text", *section.block, "```"]))
        if section.picture in images:
            parts.append(f"![{section.title}]({images[section.picture].name})")
    return "\n\n".join(parts) + "\n"


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(row)} |" for row in rest]


STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;font-size:.9rem}
th,td{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:left}
th{border-bottom:2px solid #888} img{max-width:100%}
pre{background:#f5f5f5;padding:.8rem;overflow-x:auto;font-size:.85rem}
"""


def _html(title: str, sections: Sequence[Section], images: dict[str, Path]) -> str:
    """One file: the pictures are in it."""
    say = html.escape
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{say(title)}</title>'
        f"<style>{STYLE}</style><h1>{say(title)}</h1>"
    ]
    for section in sections:
        parts.append(f"<h2>{say(section.title)}</h2>")
        parts += [f"<p>{say(line)}</p>" for line in section.lines]
        if len(section.table) > 1:
            head, *rest = section.table
            rows = ["".join(f"<th>{say(cell)}</th>" for cell in head)]
            rows += ["".join(f"<td>{say(cell)}</td>" for cell in row) for row in rest]
            parts.append("<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>")
        parts += [f"<p>{say(line)}</p>" for line in section.after]
        if section.block:
            parts.append(f"<pre>{say(chr(10).join(section.block))}</pre>")
        if section.picture in images:
            data = base64.b64encode(images[section.picture].read_bytes()).decode()
            parts.append(f'<img alt="{say(section.title)}" src="data:image/png;base64,{data}">')
    return "\n".join(parts) + "</html>\n"


# --- pictures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    label: str
    held: Estimate
    rate: float  # tokens/s a GPU
    room: float | None  # bytes
    taken: bool
    note: str = field(default="")

    @property
    def fits(self) -> bool:
        return self.room is None or self.held.needed <= self.room


def pictures(decided: Decision, folder: Path) -> list[str]:
    """Draws precision.png and, where layouts were searched, splits.png; the names drawn."""
    taken = decided.taken
    base = decided.baseline
    bars = []
    for one in decided.precisions:
        if one.held is None or one.speed is None:
            continue
        gain = decided.gain(one)
        note = f"{gain:.2f} x BF16" if gain and one is not base else ""
        bars.append(Bar(one.name, one.held, one.rate, one.room, one is taken, note))
    model, hardware = taken.config.model, taken.config.hardware
    where = (
        f"{model.name}, sequences of {model.seq_length:,}, on {hardware.nodes} x {hardware.name}"
    )
    drawn = {"precision": (bars, f"{where}: each precision in its fastest layout")}
    options = taken.options
    if options is not None and (options.best or options.too_large):
        shown = [*options.best[:SHOWN], *options.too_large[: 2 if options.best else SHOWN]]
        splits = [
            Bar(
                report.layout_words(option.config, option.facts.data_parallel),
                option.memory,
                option.speed.tokens_per_s_per_gpu,
                taken.room,
                option.config == taken.config,
            )
            for option in shown
        ]
        drawn["splits"] = (splits, f"{where}, {taken.name}: the fastest splits")
    for name, (rows, title) in drawn.items():
        _draw(rows, title, folder / f"{name}.png")
    return list(drawn)


def _draw(bars: list[Bar], title: str, path: Path) -> None:
    """Memory by part beside tokens/s, a row each, the first on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.3 + 0.45 * len(bars)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.5, 1])
    figure.suptitle(f"{title} (predicted)", fontsize=12)
    rows = list(range(len(bars)))[::-1]
    _draw_memory(left, bars, rows)
    _draw_speed(right, bars, rows)
    left.set_yticks(rows, [bar.label for bar in bars])
    for label, bar in zip(left.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if bar.taken else "normal")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _draw_memory(axes: Any, bars: list[Bar], rows: list[int]) -> None:
    gib = report.GIB
    start = [0.0] * len(bars)
    for part, colour in COLOURS.items():
        sizes = [bar.held.parts.get(part, 0.0) / gib for bar in bars]
        if max(sizes) < 0.05:
            continue
        axes.barh(rows, sizes, left=start, color=colour, height=0.62, label=part)
        start = [at + size for at, size in zip(start, sizes, strict=True)]
    rest = [bar.held.needed / gib - at for bar, at in zip(bars, start, strict=True)]
    axes.barh(rows, rest, left=start, color=REST_COLOUR, height=0.62, label=REST)
    room = next((bar.room / gib for bar in bars if bar.room), None)
    widest = max(bar.held.needed / gib for bar in bars)
    for row, bar in zip(rows, bars, strict=True):
        needed = bar.held.needed / gib
        said = f"{needed:,.0f}" if bar.fits else f"{needed:,.0f}, too large"
        # Beyond the line, where it would stand on it.
        at = room if room is not None and 0.9 * room < needed < room else needed
        axes.annotate(said, (at, row), xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=9, bbox={"facecolor": "white", "edgecolor": "none",
                                                     "alpha": 0.85, "pad": 1})  # fmt: skip
    if room is not None:
        axes.axvline(room, color="black", linewidth=1.2, linestyle=(0, (5, 3)),
                     label=f"one GPU has {room:,.0f} GiB")  # fmt: skip
    axes.set_xlim(0, 1.2 * max(widest, room or 0))
    axes.set_xlabel("memory of the fullest GPU (GiB)")


def _draw_speed(axes: Any, bars: list[Bar], rows: list[int]) -> None:
    for row, bar in zip(rows, bars, strict=True):
        colour = TAKEN if bar.taken else OTHER if bar.fits else TOO_LARGE
        axes.barh(row, bar.rate, color=colour, height=0.62, hatch="" if bar.fits else "//",
                  edgecolor="white", linewidth=0)  # fmt: skip
        said = f"{bar.rate:,.0f}" + (f"  {bar.note}" if bar.note else "")
        if not bar.fits:
            said += "  if it fitted"
        axes.annotate(said, (bar.rate, row), xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=9)  # fmt: skip
    axes.set_xlim(0, 1.5 * max(bar.rate for bar in bars))
    axes.set_xlabel("tokens/s a GPU")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
