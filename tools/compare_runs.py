"""Many runs side by side: a table of how they ended, and a picture of their losses and speeds.

    python tools/compare_runs.py runs/gpt_tiny/20261201-104616
    python tools/compare_runs.py runs/a runs/b --picture a_and_b.png

Takes run folders, and folders that hold some (a sweep's). Results of runs on SageMaker are brought
here first; --offline takes what is here already.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from launch.train import report
from planning.findings import ChoiceError, Finding, Refusal
from planning.plan import Plan, load
from planning.report import count, table
from training import curve

MARKS = ("plan.yaml", "metrics.jsonl", "result.json", "job.json")  # of a run folder
MOST_CURVES = 12  # in one picture that can still be read


@dataclass(frozen=True)
class Run:
    """label: what tells it from the others. series: None before its first step."""

    label: str
    path: Path
    plan: Plan | None
    result: dict[str, Any]
    series: curve.Series | None


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/compare_runs.py",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--picture", type=Path, help="default: compare.png in the first FOLDER")
    parser.add_argument("--offline", action="store_true", help="do not look at SageMaker")
    given = parser.parse_args(words)
    try:
        paths = find(given.folders)
        if not given.offline:
            bring(paths)
        runs = read(paths)
        print("\n".join(table(rows(runs))))
        picture = given.picture or given.folders[0] / "compare.png"
        told = [run for run in runs if run.series is not None and len(run.series.step)]
        if told:
            draw(told, picture)
            print(f"picture: {picture}")
        else:
            print("no run has a step yet: no picture")
    except Refusal as refusal:
        return report(refusal)
    return 0


def find(folders: Sequence[Path]) -> list[Path]:
    """The run folders in and below the given ones. ChoiceError for a folder without any."""
    found: list[Path] = []
    for folder in folders:
        here = []
        for path, inside, files in os.walk(folder):
            if any(mark in files for mark in MARKS):
                here.append(Path(path))
                inside.clear()
        if not here:
            raise ChoiceError(
                Finding("no-run", "error", str(folder), "no run is there",
                        f"a run's folder holds {', '.join(MARKS[:3])}")
            )  # fmt: skip
        found += sorted(here, key=_natural)
    return list(dict.fromkeys(found))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Jobs of a sweep by number: 2 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts]


def bring(paths: Sequence[Path]) -> None:
    """Copy the results of runs on SageMaker to their folders here."""
    from launch.aws.record import FILE

    submitted = [path for path in paths if (path / FILE).exists()]
    if not submitted:
        return
    from launch.aws import results
    from launch.aws.clients import Clients
    from launch.aws.record import Record

    clients: dict[str, Clients] = {}
    for path in submitted:
        record = Record.load(path)
        if record.region not in clients:
            clients[record.region] = Clients(record.region)
        try:
            results.fetch(record, path, clients[record.region])
        except Refusal as refusal:
            print(f"warning: {path}: {refusal.findings[0].message}", file=sys.stderr)


def read(paths: Sequence[Path]) -> list[Run]:
    common = os.path.commonpath([p.resolve() for p in paths]) if len(paths) > 1 else ""
    runs = []
    for path in paths:
        label = str(path.resolve().relative_to(common)) if common else path.name
        try:
            plan: Plan | None = load(path / "plan.yaml")
        except (OSError, ValueError, AttributeError):
            plan = None
        try:
            result = dict(json.loads((path / "result.json").read_text()))
        except (OSError, ValueError):
            result = {}
        try:
            series: curve.Series | None = curve.read(path / "metrics.jsonl")
        except OSError:
            series = None
        runs.append(Run(label, path, plan, result, series))
    return runs


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """The table: its head, then a row a run."""
    made = [["run", "model", "precision", "status", "steps", "tokens", "loss", "validation",
             "tokens/s/GPU", "MFU", "peak GiB"]]  # fmt: skip
    for run in runs:
        config, result, series = run.plan.config if run.plan else None, run.result, run.series
        steps = result.get("steps")
        if steps is None and series is not None and len(series.step):
            steps = int(series.step[-1])
        loss = result.get("final_loss")
        if loss is None and series is not None and len(series.loss):
            loss = float(series.loss[-1])
        tokens = steps * run.plan.derived.tokens_per_step if run.plan and steps else None
        rate, mfu = result.get("median_tokens_per_s_per_gpu"), result.get("median_mfu")
        made.append(
            [
                run.label,
                config.model.name if config else "?",
                config.precision.name if config else "?",
                str(result.get("status", "no result yet")),
                f"{steps:,}" if steps is not None else "",
                count(tokens) if tokens else "",
                _loss(loss),
                _loss(result.get("validation_loss")),
                f"{rate:,.0f}" if rate else "",
                f"{100 * mfu:.1f}%" if mfu else "",
                f"{result['peak_memory_gib']:.1f}" if result.get("peak_memory_gib") else "",
            ]
        )
    return made


def _loss(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def draw(runs: Sequence[Run], picture: Path) -> None:
    """Losses over tokens (over steps where tokens are not known), and throughput, as a PNG."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = runs[:MOST_CURVES]
    if len(runs) > MOST_CURVES:
        print(f"the picture shows the first {MOST_CURVES} of {len(runs)} runs", file=sys.stderr)
    figure = Figure(figsize=(10, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    series = [run.series for run in shown if run.series is not None]
    by_tokens = all(np.isfinite(one.tokens).all() for one in series)
    colors = colormaps["tab20" if len(shown) > 10 else "tab10"]
    ranges = []
    for number, (run, one) in enumerate(zip(shown, series, strict=True)):
        at = one.tokens if by_tokens else one.step
        color = colors(number)
        top.plot(at, one.loss, color=color, alpha=0.2, linewidth=0.7)
        top.plot(at, curve.smoothed(one.loss), color=color, linewidth=1.6, label=run.label,
                 marker="o" if len(at) < 10 else "")  # fmt: skip
        bottom.plot(at, one.throughput, color=color, linewidth=0.9, alpha=0.8)
        if np.isfinite(one.loss).any():
            ranges.append(curve.limits(one.loss, []))
    if ranges:
        top.set_ylim(min(low for low, _ in ranges), max(high for _, high in ranges))
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False, fontsize=8)
    bottom.set_ylabel("tokens/s/GPU")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("tokens" if by_tokens else "step")
    for axis in (bottom.xaxis, bottom.yaxis):
        axis.set_major_formatter(lambda value, _: curve.short(value))
    for axes in (top, bottom):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png")


if __name__ == "__main__":
    sys.exit(main())
