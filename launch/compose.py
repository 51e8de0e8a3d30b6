"""conf/ and the command line -> RunConfig; the one place that reads conf/.

Hydra's and pydantic's errors become one finding each, with the nearest legal name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from planning.findings import ChoiceError, Finding, did_you_mean
from planning.schema import RunConfig

CONF = Path(__file__).resolve().parents[1] / "conf"


def validate(composed: DictConfig) -> RunConfig:
    """The typed choice. Raises ChoiceError with all that is wrong in it."""
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ChoiceError(Finding("config", "error", "", str(error).splitlines()[0])) from error
    assert isinstance(values, dict)
    # Overlays such as conf/local are merged by Hydra; their empty group nodes say nothing.
    chosen = {
        str(key): value for key, value in values.items() if key not in ("experiment", "local")
    }
    return from_values(chosen)


def from_values(values: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ChoiceError(list(_findings(error))) from error


def _findings(error: ValidationError) -> Iterator[Finding]:
    seen = set()
    for problem in error.errors(include_url=False):
        # A union reports each of its members; the setting is the part of named fields.
        path = [str(part) for part in problem["loc"]]
        setting = _setting(path)
        if setting in seen:
            continue
        seen.add(setting)
        kind, given = problem["type"], problem.get("input")
        if kind == "extra_forbidden":
            known = list(settings())
            yield Finding(
                "unknown-setting",
                "error",
                setting,
                f"there is no such setting{did_you_mean(setting, known)}",
            )
        elif kind == "missing":
            yield Finding("missing-setting", "error", setting, "it has no value")
        elif kind == "literal_error":
            legal = legal_values(setting)
            yield Finding(
                "illegal-value",
                "error",
                setting,
                f"{given!r} is not legal{did_you_mean(str(given), legal)}",
                f"take one of {', '.join(legal)}",
            )
        else:
            yield Finding(
                "illegal-value",
                "error",
                setting,
                f"{given!r} is not legal: {_reason(setting, problem['msg'])}",
            )


def _reason(setting: str, message: str) -> str:
    field = _field(setting)
    if field is not None and "%" in str(field):
        return 'a number, or a share such as "15%"'
    return message[0].lower() + message[1:]


def _setting(path: list[str]) -> str:
    """The dotted setting of an error's location: its longest prefix that names a field."""
    known = settings()
    for end in range(len(path), 0, -1):
        name = ".".join(path[:end])
        if name in known:
            return name
        if end == len(path) and ".".join(path[: end - 1]) in {_parent(s) for s in known}:
            return name  # an unknown key of a known group
    return ".".join(path)


def _parent(setting: str) -> str:
    return setting.rpartition(".")[0]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from _models(part)


def settings(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every setting's dotted name with its annotation, groups included."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field.annotation
        for inner in _models(field.annotation):
            found |= settings(inner, f"{prefix}{name}.")
    return found


def _field(setting: str) -> Any:
    owner: type[BaseModel] = RunConfig
    field = None
    for name in setting.split("."):
        field = owner.model_fields.get(name)
        if field is None:
            return None
        owner = next(_models(field.annotation), owner)
    return field


def legal_values(setting: str) -> list[str]:
    """The values of a setting that takes one of a few words."""
    found: list[str] = []

    def walk(annotation: Any) -> None:
        for part in get_args(annotation):
            if isinstance(part, str):
                found.append(part)
            else:
                walk(part)

    walk(settings().get(setting))
    return found


def choices(group: str) -> list[str]:
    """The choices of a group, nested ones too ("bench/fp8")."""
    folder = CONF / group
    return sorted(str(path.relative_to(folder))[:-5] for path in folder.rglob("*.yaml"))


def groups() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def translate(error: HydraException | OmegaConfBaseException) -> ChoiceError:
    """Hydra's refusal of a command line, in our words."""
    text = str(error)
    if found := re.search(r"Could not find '([^']+)'", text):
        group, _, choice = found.group(1).partition("/")
        legal = choices(group)
        return _refuse(
            group,
            f"there is no {choice!r}{did_you_mean(choice, legal)}",
            f"choose from {', '.join(legal)}",
        )
    if found := re.search(r"Could not (?:override|delete)[^']*'([^']+)'", text):
        name = found.group(1).partition("@")[0]
        known = [*settings(), *groups()]
        leaf = did_you_mean(name, known) or _same_leaf(name, known)
        return _refuse(name, f"there is no such setting or group{leaf}", _overview(name))
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if "parsing override" in text or "mismatched input" in text or "token recognition" in text:
        return _refuse(
            "", f"{first}", "write name=value; quote what your shell would take: 'data.paths=[a,b]'"
        )
    return _refuse("", first, "")


def _same_leaf(name: str, known: list[str]) -> str:
    """'; did you mean layout.tensor_parallel?' for a setting given without its group."""
    leaf = name.rpartition(".")[2]
    same = [setting for setting in known if setting.rpartition(".")[2] == leaf]
    if not same:
        leaves = {setting.rpartition(".")[2]: setting for setting in known}
        near = did_you_mean(leaf, leaves)
        same = [leaves[near.removeprefix("; did you mean ")[:-1]]] if near else []
    return f"; did you mean {' or '.join(same)}?" if same else ""


def _overview(name: str) -> str:
    group = name.partition(".")[0]
    inner = [s for s in settings() if s.startswith(group + ".") and s.count(".") == 1]
    if "." in name and inner:
        return f"{group} has {', '.join(s.partition('.')[2] for s in inner)}"
    return f"groups: {', '.join(groups())}; settings: see --cfg job"


def _refuse(setting: str, message: str, fix: str) -> ChoiceError:
    return ChoiceError(Finding("command-line", "error", setting, message, fix))
