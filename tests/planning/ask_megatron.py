"""Asks the installed Megatron what it makes of plans: `python -m tests.planning.ask_megatron FILE`.

FILE holds one JSON object a line: `arguments`, `environment`, `world_size`, `capability` (of the
GPU; null: a CPU). Printed for each, as JSON: what Megatron says of it, or null. The last line has
the arguments that the plans do not give and Megatron changed by itself.

Nothing is computed and no GPU is needed: what Megatron asks of the machine is answered for the
plan's. Without Transformer Engine its version is answered too, and its fused Adam is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import warnings
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import TransformerConfig
from megatron.training import argument_utils, arguments
from packaging.version import Version

from training.arguments import forced

HAVE_TE = find_spec("transformer_engine") is not None
TE_VERSION = Version("2.20.2")
# Argument -> TransformerConfig's field, where the names differ (argument_utils.py).
RENAMED = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "fp8_param_gather": "fp8_param",
    "fp4_param_gather": "fp4_param",
}


def main(path: Path) -> None:
    said = sys.stdout
    _prepare()
    silent: dict[str, set[str]] = {}
    for line in path.read_text().splitlines():
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = ask(json.loads(line), silent)
        print(json.dumps(answer), file=said)
    print(json.dumps({name: sorted(changes) for name, changes in silent.items()}), file=said)


def _prepare() -> None:
    # Megatron's parser of 800 arguments takes 0.2 s to build and is the same each time.
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments.add_megatron_arguments = lambda _: parser
    arguments._print_args = lambda *_: None
    if not HAVE_TE:
        utils.get_te_version = lambda: TE_VERSION
        rope_utils.fused_apply_rotary_pos_emb = lambda *_: None


def ask(plan: dict[str, Any], silent: dict[str, set[str]]) -> str | None:
    """Why Megatron rejects the plan, or what it changes of it; None: it takes it as it is."""
    given = plan["arguments"]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": ""} | plan["environment"]
    os.environ |= environment | {"RANK": "0", "WORLD_SIZE": str(plan["world_size"])}
    major, minor = plan["capability"] or (10, 0)  # of a CPU: as training/cpu_standin.py says
    torch.cuda.get_device_capability = lambda *_: (major, minor)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=major, minor=minor)
    sys.argv = ["worker", *given]
    try:
        args = arguments.parse_args()
        before = {name: list(v) if isinstance(v, list) else v for name, v in vars(args).items()}
        arguments.validate_args(args)
        if changed := forced(given, before, vars(args)):
            return "; ".join(finding.message for finding in changed)
        config = argument_utils.core_transformer_config_from_args(args)
        if HAVE_TE or not args.use_precision_aware_optimizer:
            argument_utils.pretrain_cfg_container_from_args(args)
    except SystemExit as error:
        return f"the parser ends with {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    names = _given_names(given)
    for name, value in before.items():
        after = getattr(args, name, None)
        if name not in names and type(value) is type(after) and value != after:
            silent.setdefault(name, set()).add(f"{value} -> {after}")
    return _differs(args, config, names)


def _given_names(given: list[str]) -> set[str]:
    parser = arguments.add_megatron_arguments(None)
    options = [word for word in given if word.startswith("--")]
    return {parser._option_string_actions[option].dest for option in options}


def _differs(args: Namespace, config: TransformerConfig, names: set[str]) -> str | None:
    """A given value that the model's configuration holds differently."""
    for name in names:
        field = RENAMED.get(name, name)
        value, held = getattr(args, name, None), getattr(config, field, None)
        if hasattr(config, field) and type(value) is type(held) and value != held:
            return f"TransformerConfig.{field} is {held}, and the plan says {value}"
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
