"""RunConfigs from the files of conf/ without Hydra, which takes a tenth of a second for each.

tests/launch/test_compose.py compares with Hydra's own composition.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launch import compose, machine
from planning.rules import Facts
from planning.schema import RunConfig

ROOT = Path(__file__).resolve().parents[1]
# A machine without a GPU and with much memory, so that `hardware=this` is the same everywhere.
CPU = machine.Machine(gpu_names=(), gpu_memory_gib=None, host_gib=64.0, cores=2)


@cache
def _file(name: str) -> DictConfig:
    """A file of conf/; most of the time of a choice was reading it again."""
    loaded = OmegaConf.load(compose.CONF / f"{name}.yaml")
    if name != "config":
        loaded.pop("defaults", None)  # a team's own values, which are not here
    return loaded


@cache
def defaults() -> dict[str, str]:
    """The choice of each group that conf/config.yaml starts from."""
    listed = OmegaConf.to_container(_file("config"))["defaults"]
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
    own = {k: v for k, v in _file("config").items() if k in RunConfig.model_fields}
    groups = {group: _file(f"{group}/{name}") for group, name in chosen.items()}
    merged = OmegaConf.merge(own, groups, OmegaConf.from_dotlist(settings))
    found = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def config(*overrides: str) -> RunConfig:
    """The typed choice, `hardware=this` being a CPU."""
    chosen = compose.from_values(values(*overrides))
    return chosen.model_copy(update={"hardware": machine.fill(chosen.hardware, CPU)})


@cache
def part(group: str, name: str) -> Any:
    """The typed group of one choice; training's is that of a model."""
    if group == "training":
        return compose.from_values(values(f"model={name}")).training
    chosen = compose.from_values(values(f"{group}={name}"))
    if group == "hardware":
        return machine.fill(chosen.hardware, CPU)
    return getattr(chosen, group)


@cache
def _usual() -> RunConfig:
    return config()


def combine(groups: dict[str, str]) -> RunConfig:
    """The choice of `group=name ...`, all groups being ready; `groups` has the model."""
    parts = {group: part(group, name) for group, name in groups.items()}
    parts["training"] = part("training", groups["model"])
    return _usual().model_copy(update=parts)


GROUPS = ("model", "precision", "layout", "hardware")


def product() -> Iterator[dict[str, str]]:
    """Every model x precision x layout x hardware, as `combine` takes it."""
    for names in itertools.product(*map(compose.choices, GROUPS)):
        yield dict(zip(GROUPS, names, strict=True))


def line(groups: dict[str, str]) -> str:
    """The words of a command line."""
    return " ".join(f"{group}={name}" for group, name in groups.items())


def facts(config: RunConfig) -> Facts:
    """What the rules and estimates are asked about."""
    return Facts.of(config)


@cache
def _estimated(words: tuple[str, ...]) -> RunConfig:
    return config(*words)


def estimated(words: Sequence[str]) -> RunConfig:
    """The choice of a command line for estimates, where `launch=...` counts for nothing and the
    micro batch is 1 unless it is named."""
    kept = (word for word in words if not word.startswith("launch"))
    return _estimated(("training.micro_batch_size=1", *kept))
