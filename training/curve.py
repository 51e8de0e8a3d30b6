"""loss.png: a run's losses and throughput as one picture, from its metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_BLUE, _RED, _GRAY = "#1f5fa8", "#c8442b", "#808080"
_KEYS = ("tokens", "loss", "tokens_per_s_per_gpu")


@dataclass
class Series:
    """The lines of metrics.jsonl as arrays over steps; NaN where a value is missing."""

    step: Array
    tokens: Array  # seen up to and with the step
    loss: Array  # nats per token
    throughput: Array  # tokens/s/GPU
    validation: dict[int, float] = field(default_factory=dict)  # step -> nats per token
    resumed: list[int] = field(default_factory=list)  # first steps of later starts


def read(path: Path) -> Series:
    """Read metrics.jsonl. Where a resumed run repeats steps, the later lines are taken.

    A line {"step": N, "resumed": true} says that training went on after N; a step that is not
    beyond the last one says so too.
    Lines that are cut or no JSON are passed over. Raises OSError.
    """
    steps: dict[int, dict[str, float]] = {}
    validation: dict[int, float] = {}
    resumed = []
    last = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            step = int(record["step"]) + bool(record.get("resumed"))
            is_start = "resumed" in record or ("loss" in record and step <= last)
        except (ValueError, KeyError, TypeError):
            continue
        if is_start and last:
            resumed.append(step)
            steps = {old: value for old, value in steps.items() if old < step}
            validation = {old: value for old, value in validation.items() if old < step}
            last = step - 1
        if "loss" in record:
            steps[step] = {key: _number(record.get(key)) for key in _KEYS}
            last = step
        elif "validation_loss" in record:
            validation[step] = _number(record["validation_loss"])
    tokens, loss, throughput = (
        np.array([row[key] for row in steps.values()], dtype=float) for key in _KEYS
    )
    step_numbers = np.array(list(steps), dtype=float)
    return Series(step_numbers, tokens, loss, throughput, validation, sorted(set(resumed)))


def draw(metrics: Path, picture: Path, title: str, per: str = "GPU") -> tuple[bool, str]:
    """Draw `metrics` (metrics.jsonl) into `picture` (PNG). Never raises.

    per: what the throughput is of, "GPU" or "process".
    Returns (True, "") or (False, why there is no picture); an older picture stays then.
    """
    try:
        series = read(metrics)
        if not len(series.step):
            return False, f"{metrics} holds no steps"
        if not np.isfinite(series.loss).any():
            return False, f"no loss in {metrics} is finite"
        _draw(series, picture, title, per)
    except Exception as error:  # a picture must not end a run
        return False, f"{type(error).__name__}: {error}"
    return True, ""


def _draw(series: Series, picture: Path, title: str, per: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    has_speed = bool(np.isfinite(series.throughput).any())
    if has_speed:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    else:
        top = bottom = figure.subplots()
    figure.suptitle(title, fontsize=12)
    _draw_loss(top, series)
    if has_speed:
        _draw_throughput(bottom, series, per)
        top.tick_params(labelbottom=False)
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    first, last = series.step[0], series.step[-1]
    margin = max(0.01 * (last - first), 0.5)
    top.set_xlim(first - margin, last + margin)
    _token_axis(top, series)
    for axes in {top, bottom}:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for start in series.resumed:
            axes.axvline(start - 0.5, color=_GRAY, linestyle=(0, (4, 3)), linewidth=0.9)
    beside = picture.with_name(f".{picture.name}.new")
    figure.savefig(beside, format="png")
    beside.replace(picture)


def _draw_loss(axes, series: Series) -> None:  # type: ignore[no-untyped-def]
    step, loss = series.step, series.loss
    smooth = smoothed(loss)
    few = len(step) < 10
    if not few:
        axes.plot(step, loss, color=_BLUE, alpha=0.3, linewidth=0.8)
    axes.plot(
        step,
        loss if few else smooth,
        color=_BLUE,
        linewidth=1.8,
        marker="o" if few else "",
        label=f"training, {_first_and_last(loss if few else smooth)}",
    )
    finite = {at: value for at, value in series.validation.items() if math.isfinite(value)}
    if finite:
        axes.plot(
            list(finite),
            list(finite.values()),
            color=_RED,
            marker="o",
            markersize=4.5,
            linewidth=1,
            label=f"validation, {_first_and_last(np.array(list(finite.values())))}",
            zorder=3,
        )
    axes.set_ylabel("loss (nats per token)")
    low, high = limits(loss, list(finite.values()))
    axes.set_ylim(low, high)
    if series.resumed:
        axes.plot([], [], color=_GRAY, linestyle=(0, (4, 3)), linewidth=0.9, label="resumed")
    if (bad := ~np.isfinite(loss)).any():
        axes.plot(
            step[bad],
            np.full(int(bad.sum()), low + 0.02 * (high - low)),
            color="black",
            marker="x",
            linestyle="",
            label=f"not finite, from step {int(step[bad][0])}",
            clip_on=False,
        )
    axes.legend(frameon=False, loc="upper right")


def _draw_throughput(axes, series: Series, per: str) -> None:  # type: ignore[no-untyped-def]
    speed = series.throughput
    marker = "o" if len(speed) < 10 else ""
    axes.plot(series.step, speed, color=_GRAY, alpha=0.7, linewidth=0.8, marker=marker)
    median = float(np.nanmedian(speed))
    axes.axhline(median, color="black", linewidth=0.9)
    axes.annotate(
        f"median {median:,.0f}",
        xy=(1, median),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    # A start-up step of a tenth of the speed must not flatten the rest.
    axes.set_ylim(0, 1.25 * float(np.nanpercentile(speed, 98)))
    axes.set_ylabel(f"tokens/s/{per}")
    axes.yaxis.set_major_formatter(lambda value, _: short(value))


def _token_axis(axes, series: Series) -> None:  # type: ignore[no-untyped-def]
    """A second axis on top, in tokens, where the tokens per step are known."""
    known = np.isfinite(series.tokens) & (series.step > 0)
    if not known.any():
        return
    per_step = float(series.tokens[known][-1] / series.step[known][-1])
    to_tokens: Callable[[Array], Array] = lambda step: step * per_step  # noqa: E731
    axis = axes.secondary_xaxis("top", functions=(to_tokens, lambda tokens: tokens / per_step))
    axis.set_xlabel("tokens")
    axis.xaxis.set_major_formatter(lambda value, _: short(value))
    axis.spines["top"].set_visible(False)


def smoothed(values: Array) -> Array:
    """Mean over a centred window of an eighth of the way so far, at most a fortieth of all.

    Narrow at the start, where the loss falls fast. NaN stays NaN and counts in no mean.
    """
    count = len(values)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(count)
    half = np.minimum(at // 16, count // 80)
    low, high = at - half, np.minimum(at + half + 1, count)
    mean = (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)
    return np.where(finite, mean, np.nan)


def limits(loss: Array, validation: list[float]) -> tuple[float, float]:
    """The loss axis' range: all but the first tenth, and above it at most twice as much.

    So the end of a long run, between 2.8 and 2.6, can be read although it began at 11.
    """
    finite = loss[np.isfinite(loss)]
    tail = finite[len(finite) // 10 :]
    points = validation[len(validation) // 10 :]
    low = min([float(tail.min()), *points])
    high = max([float(np.percentile(tail, 99.5)), *points])
    start = float(finite[: max(len(finite) // 10, 1)].max())
    span = max(high - low, 0.02 * abs(high), 1e-6)
    return low - 0.06 * span, min(max(start, high), high + 2 * span) + 0.06 * span


def short(value: float) -> str:
    """12,300 as 12.3K, 4e9 as 4B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _first_and_last(values: Array) -> str:
    first, *_, last = np.repeat(values[np.isfinite(values)], 2)
    return f"{first:.2f} to {last:.3f}" if first != last else f"{last:.3f}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
