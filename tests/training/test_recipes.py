"""What Transformer Engine is told: the real recipe objects that Megatron makes of our precisions.

Needs Transformer Engine's packages, in a folder that SLIPWAY_TE_SITE names or in the environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planning.resolve import resolve
from tests.choices import config
from tests.training.runs import ROOT

SITE = os.environ.get("SLIPWAY_TE_SITE")
pytestmark = pytest.mark.skipif(
    SITE is None and importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed (extra `te`)",
)
# precision -> hardware, TE's class, elements, BF16 layers of Megatron's (two a block; gpt_1b: 16)
EXPECTED = {
    "fp8": ("h200", "Float8CurrentScaling", "HYBRID", [2, 2]),
    "fp8_delayed": ("h200", "DelayedScaling", "HYBRID", [0, 0]),
    "fp8_blockwise": ("h200", "Float8BlockScaling", "HYBRID", [0, 0]),
    "mxfp8": ("b200", "MXFP8BlockScaling", "E4M3", [0, 0]),
    "nvfp4": ("b200", "NVFP4BlockScaling", "E2M1", [0, 6]),  # ceil(15% of 16) = 3 blocks
    "bench/fp8": ("h200", "Float8CurrentScaling", "HYBRID", [0, 0]),
    "bench/nvfp4": ("b300", "NVFP4BlockScaling", "E2M1", [0, 0]),
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recipes")
    paths = {}
    for precision, (hardware, *_) in EXPECTED.items():
        plan = resolve(
            config("model=gpt_1b", f"precision={precision}", f"hardware={hardware}")
        ).plan
        assert plan is not None
        paths[precision] = folder / f"{precision.replace('/', '-')}.yaml"
        paths[precision].write_text(plan.to_yaml())
    search = [SITE] if SITE else []
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("te_recipes.py")), *map(str, paths.values())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*search, str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    marked = [line for line in done.stdout.splitlines() if line.startswith("RECIPES ")]
    assert marked, done.stderr[-3000:]
    found = json.loads(marked[0].removeprefix("RECIPES "))
    return {precision: found[str(path)] for precision, path in paths.items()}


@pytest.mark.parametrize("precision", EXPECTED)
def test_each_precision_is_the_recipe_it_names(recipes: dict[str, Any], precision: str) -> None:
    _, kind, elements, bf16_layers = EXPECTED[precision]
    found = recipes[precision]
    assert (found["class"], found["format"]) == (kind, elements)
    assert found["bf16_layers"] == bf16_layers
    assert found["layers"] == 32


def test_delayed_scaling_keeps_a_history_of_1024(recipes: dict[str, Any]) -> None:
    found = recipes["fp8_delayed"]
    assert (found["history"], found["algorithm"]) == (1024, "max")
