"""RunConfigs from the files of conf/ without Hydra, which takes a tenth of a second for each.

tests/launch/test_compose.py compares with Hydra's own composition.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from launch import compose, machine
from planning.schema import RunConfig

ROOT = Path(__file__).resolve().parents[1]
# A machine without a GPU and with much memory, so that `hardware=this` is the same everywhere.
CPU = machine.Machine(gpu_names=(), gpu_memory_gib=None, host_gib=64.0, cores=2)


@cache
def _file(name: str) -> str:
    return (compose.CONF / f"{name}.yaml").read_text()


@cache
def defaults() -> dict[str, str]:
    """The choice of each group that conf/config.yaml starts from."""
    listed = yaml.safe_load(_file("config"))["defaults"]
    return {
        group: choice
        for entry in listed
        if isinstance(entry, dict)
        for group, choice in entry.items()
        if group in RunConfig.model_fields
    }


def values(*overrides: str) -> dict[str, Any]:
    """What `launch/train.py OVERRIDES` composes; `+`, `~` and `experiment` are Hydra's alone."""
    chosen, settings = defaults().copy(), []
    for override in overrides:
        name, _, value = override.partition("=")
        if name in chosen:
            chosen[name] = value
        else:
            settings.append(override)
    own = {k: v for k, v in yaml.safe_load(_file("config")).items() if k in RunConfig.model_fields}
    groups = {group: OmegaConf.create(_file(f"{group}/{name}")) for group, name in chosen.items()}
    merged = OmegaConf.merge(own, groups, OmegaConf.from_dotlist(settings))
    found = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def config(*overrides: str) -> RunConfig:
    """The typed choice, `hardware=this` being a CPU."""
    chosen = compose.from_values(values(*overrides))
    return chosen.model_copy(update={"hardware": machine.fill(chosen.hardware, CPU)})


@cache
def _part(group: str, name: str) -> Any:
    """The typed group of one choice; training's is that of a model."""
    if group == "training":
        return compose.from_values(values(f"model={name}")).training
    chosen = compose.from_values(values(f"{group}={name}"))
    if group == "hardware":
        return machine.fill(chosen.hardware, CPU)
    return getattr(chosen, group)


def product() -> Iterator[tuple[str, RunConfig]]:
    """(command line, choice) of every model x precision x layout x hardware."""
    other = config()
    groups = ("model", "precision", "layout", "hardware")
    for names in itertools.product(*map(compose.choices, groups)):
        parts = {g: _part(g, name) for g, name in zip(groups, names, strict=True)}
        line = " ".join(f"{g}={name}" for g, name in zip(groups, names, strict=True))
        parts["training"] = _part("training", names[0])
        yield line, other.model_copy(update=parts)
