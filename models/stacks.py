"""The stacks of layers that a model may name: the modules of this folder with a `submodules`.

A stack module defines

    submodules(backend, model) -> HybridStackSubmodules

where `backend` is "te" (Transformer Engine, on a GPU) or "torch" (Megatron's local modules, also on
a CPU) and `model` the planning.schema.ModelConfig. It gives the layer for each symbol of Megatron's
hybrid pattern that it offers and knows nothing of where it runs.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Literal

import models
from planning.findings import ChoiceError, Finding, did_you_mean

Backend = Literal["torch", "te"]


def names() -> list[str]:
    """All stacks, read from the sources: importing them would load Megatron."""
    files = [path for folder in models.__path__ for path in Path(folder).glob("*.py")]
    return sorted(path.stem for path in files if _defines_submodules(path))


def _defines_submodules(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(n, ast.FunctionDef) and n.name == "submodules" for n in tree.body)


def check(name: str) -> None:
    """Raises ChoiceError where no module of this folder is a stack of that name."""
    if name not in (known := names()):
        raise ChoiceError(
            Finding(
                "unknown-stack",
                "error",
                "model.stack",
                f"no stack {name!r} in models/{did_you_mean(name, known)}",
                f"take {', '.join(known)}, or add models/{name}.py (docs/add_a_model.md)",
            )
        )


def load(name: str) -> ModuleType:
    """The stack's module. Raises ChoiceError: there is none."""
    check(name)
    return importlib.import_module(f"models.{name}")
