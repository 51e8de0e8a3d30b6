"""Writes planning/curves.json from what one H200 measured and a minority of published rates.

    python benchmarks/fit.py

Kernels: least squares over benchmarks/h200/kernels.json. The host's share (launches) and what a
whole step adds: over the cases of benchmarks/h200/cases.jsonl that are marked `fit`. Cards that
nobody measured here: over the rows of benchmarks/published.json that are marked `fit`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import throughput_model
from launch import compose
from planning import kernels, layers
from planning.hardware import GPUS
from planning.kernels import MULTIPROCESSORS, TILE

Row = dict[str, Any]
HERE = Path(__file__).parent
H200 = GPUS["h200"]
assert H200.memory_tb_s is not None
BANDWIDTH = H200.memory_tb_s * 1e12
PEAKS = {"bf16": H200.bf16_tflops, "fp8": H200.fp8_tflops}
KINDS = {"fprop": "forward", "dgrad": "dgrad", "wgrad": "wgrad"}


def product(row: Row) -> tuple[float, float, float]:
    """rows, columns, depth of the product that the pass computes."""
    tokens, n, k = row["tokens"], row["n"], row["k"]
    return {"fprop": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}[row["pass"]]


def gemm_curve(rows: list[Row], peak_tflops: float) -> dict[str, float]:
    """The fields of planning.kernels.Curve, by least squares of the logarithm."""
    shapes = np.array([product(row) for row in rows], dtype=float)
    seconds = np.array([row["s"] for row in rows])
    waves = np.ceil(shapes[:, 0] / TILE[0]) * np.ceil(shapes[:, 1] / TILE[1])
    waves /= MULTIPROCESSORS["h200"]
    idle = np.ceil(waves) / waves - 1
    operations = 2 * shapes.prod(axis=1)

    def miss(values: np.ndarray) -> np.ndarray:
        share, depth, waste, start = values
        busy = operations / (peak_tflops * 1e12 * share) * (1 + depth / shapes[:, 2])
        return np.log((busy * (1 + waste * idle) + start * 1e-6) / seconds)

    found = least_squares(
        miss, [0.7, 150, 0.5, 4], bounds=([0.2, 0, 0, 0.5], [1.0, 2000, 1.5, 30]), loss="soft_l1",
        f_scale=0.05,
    )  # fmt: skip
    share, depth, waste, start = found.x
    left = np.abs(np.exp(found.fun) - 1)
    print(f"  {len(rows)} rows: median error {np.median(left):.1%}, 90% within "
          f"{np.quantile(left, 0.9):.1%}")  # fmt: skip
    return {
        "share": round(float(share), 4),
        "depth": round(float(depth), 1),
        "waste": round(float(waste), 3),
        "start_s": float(f"{start * 1e-6:.3g}"),
    }


def gemms(sections: dict[str, list[Row]]) -> Row:
    found: Row = {}
    for name, section, peak in (
        ("bf16", "gemm_bf16", "bf16"),
        ("head", "head", "bf16"),
        ("fp8", "gemm_fp8_current", "fp8"),
        ("fp8_blockwise", "gemm_fp8_blockwise", "fp8"),
    ):
        by_pass: dict[str, list[Row]] = defaultdict(list)
        for row in sections[section]:
            by_pass[row["pass"]].append(row)
        found[name] = {}
        for each, rows in by_pass.items():
            print(f"{name} {each}")
            found[name][KINDS[each]] = gemm_curve(rows, PEAKS[peak] or 1.0)
    return found


def attention(rows: list[Row]) -> Row:
    """The share of the peak by head size and pass, and the length at which it halves."""
    forward = {key(row): row for row in rows if row["pass"] == "forward"}
    times: dict[str, list[tuple[Row, float]]] = {"forward": [], "backward": []}
    for row in rows:
        one = row["s"]
        if row["pass"] == "forward":
            times["forward"].append((row, one))
        else:
            times["backward"].append((row, one - forward[key(row)]["s"]))
    found: Row = {"share": {"64": {}, "128": {}}, "length": {}, "start_s": {}}
    for kind, all_rows in times.items():
        factor = {"forward": 4, "backward": 10}[kind]
        length = np.array([row["length"] for row, _ in all_rows], dtype=float)
        wide = np.array([row["dim"] == 128 for row, _ in all_rows])
        seconds = np.array([s for _, s in all_rows])
        operations = np.array(
            [
                factor * r["length"] ** 2 / 2 * r["heads"] * r["dim"] * r["batch"]
                for r, _ in all_rows
            ]
        )

        def miss(v: np.ndarray) -> np.ndarray:
            share = np.where(wide, v[1], v[0])  # noqa: B023
            busy = operations / (H200.bf16_tflops * 1e12 * share)  # noqa: B023
            return np.log((busy * (1 + v[2] / length) + v[3] * 1e-6) / seconds)  # noqa: B023

        fitted = least_squares(
            miss, [0.4, 0.5, 500, 5], bounds=([0.1, 0.1, 0, 0], [1, 1, 5000, 60]), loss="soft_l1",
            f_scale=0.05,
        )  # fmt: skip
        left = np.abs(np.exp(fitted.fun) - 1)
        print(f"attention {kind}: median error {np.median(left):.1%}, worst {left.max():.1%}")
        found["share"]["64"][kind], found["share"]["128"][kind] = np.round(fitted.x[:2], 4).tolist()
        found["length"][kind] = round(float(fitted.x[2]), 1)
        found["start_s"][kind] = float(f"{fitted.x[3] * 1e-6:.3g}")
    return found


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("heads", "groups", "dim", "length", "batch"))


# Bytes that a kernel reads and writes an element of its rows, as planning/ counts them.
BYTES = {
    "rmsnorm forward": ("norm forward", 4),
    "rmsnorm backward": ("norm backward", 6),
    "add": ("add", 6),
    "residual add": ("add", 6),
    "rope": ("rope", 4),
    "swiglu forward": ("swiglu forward", 6),
    "swiglu backward": ("swiglu backward", 10),
    "gradient accumulation": ("accumulate", 10),
    "zero FP32": ("zero", 4),
    "scale FP32": ("copy", 8),
    "norm": ("norm", 4),
    "clip": ("clip", 8),
}
LOSS = {"loss forward": ("loss maximum", "loss exponents", "loss value"),
        "loss backward": ("loss gradient",)}  # fmt: skip
ADAM = {"fp32": ("adam", 28), "bf16": ("adam 16", 24)}


def elements(row: Row) -> int:
    return int(row.get("elements") or row["tokens"] * row["width"])


def traffic(sections: dict[str, list[Row]]) -> dict[str, float]:
    """Median share of the memory's bandwidth, over rows that are large enough to reach it."""
    shares: dict[str, list[float]] = defaultdict(list)
    rows = [*sections["elementwise"], *sections["compiled"], *sections["optimizer"]]
    for row in rows:
        if row["what"] == "adam":
            name, size = ADAM[row["moments"]]
        elif row["what"] in BYTES:
            name, size = BYTES[row["what"]]
        else:
            continue
        if elements(row) >= 2**23:
            shares[name].append(size * elements(row) / row["s"] / BANDWIDTH)
    by_shape: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for row in sections["compiled"]:
        if row["what"].startswith("loss"):
            by_shape[row["tokens"], row["width"]][row["what"]] = row["s"]
    for name, parts in LOSS.items():
        for (tokens, width), times in by_shape.items():
            taken = sum(times[part] for part in parts)
            shares[name].append(tokens * width / taken / BANDWIDTH)  # one byte a logit
    return {name: round(statistics.median(found), 4) for name, found in shares.items()}


CAST_BYTES = {"current": 6, "delayed": 4, "blockwise": 4}


def casts(rows: list[Row]) -> Row:
    """Share of the bandwidth for the bytes above and the fixed time, by two sizes' difference."""
    found: Row = {}
    for recipe, size in CAST_BYTES.items():
        mine = [r for r in rows if r["format"] == recipe and r["what"] == "input"]
        small, large = mine[0], mine[-1]
        rate = (large["elements"] - small["elements"]) / (large["s"] - small["s"])
        found[recipe] = {
            "bytes": size,
            "share": round(rate * size / BANDWIDTH, 4),
            "start_s": float(f"{small['s'] - small['elements'] / rate:.3g}"),
        }
    return found


# Of a block's launches: attention's and the forward pass's share, from the count of operations.
ATTENTION_SHARE, FORWARD_SHARE = 0.6, 0.58
UNMEASURED = {"E": 1.8, "G": 1.2}  # experts and gated delta nets: as three and two attentions
RECIPES = {"bf16": "none", "current": "current", "delayed": "delayed", "blockwise": "blockwise"}


def host(rows: list[Row]) -> Row:
    """What launching a layer costs, from a model so small that nothing else counts."""
    small = {r["format"]: r for r in rows if r["block"] == "small" and not r["recompute"]}
    block = small["bf16"]["s"]
    shares = {"*": ATTENTION_SHARE, "-": 1 - ATTENTION_SHARE} | UNMEASURED
    recipes = {name: round(small[f]["s"] / block, 3) for f, name in RECIPES.items() if f != "bf16"}
    return {
        "forward": {k: round(block * FORWARD_SHARE * v, 6) for k, v in shares.items()},
        "backward": {k: round(block * (1 - FORWARD_SHARE) * v, 6) for k, v in shares.items()},
        # A model of two blocks less the blocks: embedding, output layer, loss.
        "output": round(small["bf16"]["s_of_2_blocks"] - 2 * block, 6),
        # Not measured: as many operations as the largest of the measured ones, and more.
        "recipe": recipes | {"mxfp8": recipes["current"], "nvfp4": 1.25 * recipes["current"]},
    }


def write(data: Row) -> None:
    (ROOT / "planning/curves.json").write_text(json.dumps(data, indent=1) + "\n")
    for cached in (kernels.curves, kernels.kernels, layers.layer, layers.head):
        cached.cache_clear()


def fit_rows(
    data: Row,
    rows: Callable[[], list[throughput_model.Row]],
    names: dict[str, list[tuple[Row, str]]],
) -> None:
    """Set the named entries of `data` so that the rows marked `fit` come out best."""

    def miss(values: np.ndarray) -> list[float]:
        for places, value in zip(names.values(), values, strict=True):
            for where, name in places:
                where[name] = round(float(value), 5)
        write(data)
        return [math.log1p(row.error) for row in rows() if row.fit]

    start = [places[0][0][places[0][1]] for places in names.values()]
    found = least_squares(miss, start, bounds=(1e-6, 1.5), x_scale=np.maximum(start, 1e-3),
                          loss="soft_l1", f_scale=0.03, diff_step=0.01)  # fmt: skip
    miss(found.x)
    print({name: places[0][0][places[0][1]] for name, places in names.items()})


def main() -> int:
    sections = json.loads((HERE / "h200/kernels.json").read_text())["sections"]
    data: Row = {
        "source": "benchmarks/fit.py from benchmarks/h200 (one NVIDIA H200, 2026-12-01) and the "
        "rows marked fit of benchmarks/published.json",
        "gemm": gemms(sections),
        "attention": attention(sections["attention"]),
        "traffic": traffic(sections),
        # MXFP8 and NVFP4 run on Blackwell only: not measured, by their bytes (two scalings or a
        # transform, the largest value of all first).
        "casts": casts(sections["quantize"])
        | {
            "mxfp8": {"bytes": 4.2, "share": 0.6, "start_s": 4e-6},
            "nvfp4": {"bytes": 7.0, "share": 0.5, "start_s": 8e-6},
        },
        "host": host(sections["blocks"]) | {"step": 0.006},
        "sustained": 0.95,
        "cards": {"h200": {"rate": 1.0, "gemm": {}}},
    }
    # Blackwell's shares of its peaks; B200 has all of them at a rate of its own.
    blackwell = {"bf16": 0.85, "head": 0.85, "fp8": 0.85, "mxfp8": 0.85, "nvfp4": 0.85}
    data["cards"]["gb200"] = {"rate": 1.0, "gemm": blackwell}
    data["cards"]["b200"] = b200 = {"rate": 1.0, "gemm": blackwell}

    def choose(words: Any) -> Any:
        key = tuple(words)
        if key not in chosen:
            chosen[key] = compose.choose(list(words))
        return chosen[key]

    chosen: dict[tuple[str, ...], Any] = {}
    fit_rows(
        data,
        lambda: throughput_model.measured(choose),
        {"sustained": [(data, "sustained")], "step": [(data["host"], "step")]},
    )
    theirs = {row.name: row for row in throughput_model.published(choose)}
    print(f"{sum(row.fit for row in theirs.values())} published rows of {len(theirs)} calibrate")
    fit_rows(
        data,
        lambda: throughput_model.published(choose, "gb200"),
        {
            "BF16": [(blackwell, "bf16"), (blackwell, "head")],
            "FP8": [(blackwell, "mxfp8"), (blackwell, "fp8")],
            "NVFP4": [(blackwell, "nvfp4")],
        },
    )
    fit_rows(data, lambda: throughput_model.published(choose, "b200"), {"B200": [(b200, "rate")]})
    write(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
