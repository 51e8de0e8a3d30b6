"""The plan: one run, explicit and frozen; what plan.yaml holds.

It names roots (`run:`, `data:<name>`) where a machine has paths of its own; the process that starts
torchrun says where they are, and `expand` puts the paths in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from planning.roots import expand
from planning.schema import DataConfig, RunConfig

__all__ = ["VERSION", "Derived", "Frozen", "Plan", "expand", "load", "locate"]

VERSION = 1
# LibYAML's, ten times as fast, where PyYAML was built with it.
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Derived(Frozen):
    """What follows from the choice."""

    world_size: int
    data_parallel: int
    gradient_accumulation: int  # micro batches a step and rank
    tokens_per_step: int
    total_tokens: int
    parameters: int | None  # with the vocabulary as given; None: no formula
    active_parameters: int | None  # used by one token
    allocated_parameters: int | None  # with the vocabulary padded
    padded_vocab_size: int
    layer_pattern: str  # Megatron's, with `|` between pipeline stages
    bf16_blocks_at_start: int
    bf16_blocks_at_end: int
    checkpoint_format: str | None


class Plan(Frozen):
    version: int
    name: str
    backend: str  # "te" (Transformer Engine) or "torch" (a CPU)
    config: RunConfig
    derived: Derived
    processes_per_node: int
    nodes: int
    environment: dict[str, str]  # set before Python starts; `policy:NAME` is looked up there
    megatron_args: list[str]

    def to_yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json"), Dumper=_DUMPER, sort_keys=False, width=100)


def load(path: Path) -> Plan:
    """The plan in a plan.yaml. Errors: OSError, ValueError (pydantic's) for another version."""
    data: dict[str, Any] = yaml.load(path.read_text(), Loader=_LOADER)
    if data.get("version") != VERSION:
        raise ValueError(
            f"{path} has plan version {data.get('version')}, this program reads {VERSION}"
        )
    return Plan.model_validate(data, strict=False)


def locate(data: DataConfig, roots: Mapping[str, str]) -> DataConfig:
    """The data with real paths where it names roots (`data:NAME/...`)."""

    def real(value: Any) -> Any:
        if isinstance(value, list):
            return [real(item) for item in value]
        return expand(value, roots) if isinstance(value, str) else value

    names = ("paths", "train_paths", "valid_paths", "test_paths")
    return data.model_copy(update={name: real(getattr(data, name)) for name in names})
