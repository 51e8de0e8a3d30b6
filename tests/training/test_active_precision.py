"""Which precision a model really computed in, told by the state that Transformer Engine leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planning.plan import Plan
from planning.resolve import resolve
from tests.choices import config
from training.device import active_precisions, describe_precision


class MXFP8BlockScaling:
    """Named and placed as Transformer Engine's class."""


MXFP8BlockScaling.__module__ = "transformer_engine.common.recipe"


class MegatronsOwn(MXFP8BlockScaling):
    """Megatron derives classes for some recipes."""


class Linear(torch.nn.Module):
    """The attributes of TransformerEngineBaseModule after a forward pass (2.20, module/base.py)."""

    def __init__(self, recipe: Any = None, *, active: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        self.fp8 = recipe is not None and active
        self.fp8_meta = {} if recipe is None else {"recipe": recipe}


def model(*layers: Linear) -> torch.nn.Module:
    attention = torch.nn.Module()  # has state of Transformer Engine, and no weights
    attention.fp8, attention.fp8_meta = False, {}  # type: ignore[assignment]
    return torch.nn.Sequential(torch.nn.Linear(1, 1), attention, *layers)


def plan(precision: str, hardware: str = "b200") -> Plan:
    resolution = resolve(config("model=gpt_1b", f"precision={precision}", f"hardware={hardware}"))
    assert resolution.plan is not None
    return resolution.plan


def test_layers_are_counted_by_what_was_active() -> None:
    recipe = MXFP8BlockScaling()
    found = active_precisions(
        [
            model(Linear(recipe), Linear(MegatronsOwn())),
            model(Linear(), Linear(recipe, active=False)),
        ]
    )
    assert found == {"MXFP8BlockScaling": 2, "bfloat16": 2}


@pytest.mark.parametrize(
    ("precision", "layers", "expected"),
    [
        (
            "mxfp8",
            [Linear(MXFP8BlockScaling()), Linear(MXFP8BlockScaling()), Linear()],
            (True, "MXFP8BlockScaling in 2, bfloat16 in 1 of 3 linear layers of rank 0"),
        ),
        ("bf16", [Linear()], (True, "bfloat16 in 1 of 1 linear layers of rank 0")),
        (
            "mxfp8",
            [Linear()],
            (False, "bfloat16 in 1 of 1 linear layers of rank 0, and the plan is mxfp8"),
        ),
    ],
)
def test_a_recipe_that_is_planned_and_not_active_is_a_warning(
    precision: str, layers: list[Linear], expected: tuple[bool, str]
) -> None:
    assert describe_precision(plan(precision), [model(*layers)]) == expected


def test_a_cpu_says_so() -> None:
    cpu = SimpleNamespace(backend="torch", config=config("precision=fp32", "hardware=cpu"))
    assert describe_precision(cpu, []) == (True, "fp32, computed by torch on a CPU")  # type: ignore[arg-type]
