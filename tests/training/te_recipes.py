"""Prints, for each plan given, the recipe object that Megatron makes of it, as JSON.

    python tests/training/te_recipes.py PLAN.yaml ...

Runs without a GPU: the plan's card is named to Megatron's checks, Transformer Engine's classes are
the real ones.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from planning.hardware import GPUS
from planning.plan import Plan, load

CARD: dict[str, Any] = {}


def properties(*_: Any) -> Any:
    major, minor = CARD["capability"]
    return SimpleNamespace(major=major, minor=minor, total_memory=2**37, multi_processor_count=132)


torch.cuda.get_device_capability = lambda *_: CARD["capability"]  # type: ignore[assignment]
torch.cuda.get_device_properties = properties  # type: ignore[assignment]
torch.cuda.current_device = lambda: 0  # type: ignore[assignment]


def recipe(plan: Plan) -> Any:
    from megatron.core.fp4_utils import get_fp4_recipe
    from megatron.core.fp8_utils import get_fp8_recipe
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.global_vars import destroy_global_vars

    from training import arguments

    CARD["capability"] = GPUS[plan.config.hardware.gpu or ""].compute_capability
    os.environ.update(
        {k: v for k, v in plan.environment.items() if not v.startswith("policy:")},
        WORLD_SIZE=str(plan.derived.world_size),
        RANK="0",
    )
    args = arguments.parse(plan.megatron_args, {"run:": "/nowhere"})
    destroy_global_vars()
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

    destroy_num_microbatches_calculator()
    config = core_transformer_config_from_args(args)
    made = get_fp4_recipe(config) if config.fp4 else get_fp8_recipe(config)
    form = getattr(made, "fp8_format", None) or getattr(made, "fp4_format", None)
    if config.fp4:
        form = made.fp4_format
    return {
        "class": next(c.__name__ for c in type(made).__mro__ if c.__module__.startswith("transf")),
        "format": form.name,
        "history": getattr(made, "amax_history_len", None),
        "algorithm": getattr(made, "amax_compute_algo", None),
        "bf16_layers": [config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16]
        if config.first_last_layers_bf16
        else [0, 0],
        "layers": config.num_layers,
    }


if __name__ == "__main__":
    found = {path: recipe(load(Path(path))) for path in sys.argv[1:]}
    print("RECIPES " + json.dumps(found))
