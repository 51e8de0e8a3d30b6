"""conf/ and the command line -> RunConfig; the one place that reads conf/.

Hydra composes one job at a time; its errors and pydantic's become findings, with the nearest legal
name and what would do.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from launch.usage import CONF, choices, groups
from planning.findings import ChoiceError, Finding, did_you_mean, nearest, written
from planning.schema import LARGEST, RunConfig

__all__ = ["CONF", "choices", "choose", "combinations", "from_values", "groups", "repeated",
           "settings", "show", "validate"]  # fmt: skip
_VERSION = "1.3"  # of Hydra's behaviour
MOST_JOBS = 10_000  # of a sweep
MANY = 3  # more settings of a group that lack a value are one error


def choose(words: Sequence[str]) -> RunConfig:
    """The typed choice of a command line. Raises ChoiceError with all that is wrong in it."""
    parse(words)
    try:
        with hydra.initialize_config_dir(str(CONF), version_base=_VERSION):
            composed = hydra.compose("config", overrides=list(words))
    except Exception as error:  # Hydra has no class of its own for some: ValueError, KeyError, ...
        raise translate(error) from error
    return validate(composed)


def parse(words: Sequence[str]) -> list[Override]:
    """The words as Hydra reads them. Raises ChoiceError for those that are no override."""
    parser, found, wrong = OverridesParser.create(), [], []
    for word in words:
        try:
            override = parser.parse_override(word)
        except (HydraException, ValueError, RecursionError) as error:
            wrong.append(_unreadable(word, error))
            continue
        found.append(override)
        if problem := _pointless(override):
            wrong.append(problem)
    if wrong:
        raise ChoiceError(wrong)
    return found


def _pointless(override: Override) -> Finding | None:
    """What Hydra takes, and what would change nothing or break the choice here."""
    name = override.key_or_group
    if not name:
        return _unreadable(str(override.input_line), ValueError())
    if re.split("[./]", name)[0] == "hydra":
        return _finding(
            name,
            "Hydra's own settings change nothing here",
            "run_dir=PATH is the folder of a run, -m starts a sweep",
        )
    group, _, leaf = name.rpartition(".")
    if leaf and leaf == _tag(group):
        kinds = ", ".join(_tags(group))
        return _finding(name, f"it comes with the choice of {group}", f"write {group}={kinds}")
    if override.is_delete() and name in (*groups(), *settings()):
        return _finding(name, "nothing can be left out", f"write {name}=VALUE")
    if name in groups():
        taken = override.is_sweep_override() or isinstance(override.value(), str)
        if override.package is not None or not taken:
            legal = ", ".join(choices(name))
            return _finding(
                name, f"{_short(override.input_line)} names no choice", f"choose from {legal}"
            )
    return None


def combinations(words: Sequence[str]) -> list[list[str]]:
    """The words of each job of a sweep: a value with commas, or range(...), makes several."""
    jobs: dict[str, list[str]] = {}
    for word, override in zip(words, parse(words), strict=True):
        name = override.get_key_element()
        if not override.is_sweep_override():
            jobs[name] = [word]
        elif override.is_discrete_sweep():
            found = itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1)
            jobs[name] = [f"{name}={value}" for value in found]
        else:
            raise _refuse(name, f"{word} has no end of values", "take choice(...) or range(...)")
    if (count := math.prod(map(len, jobs.values()))) > MOST_JOBS:
        raise _refuse("", f"{count:,} jobs and more", f"a sweep has at most {MOST_JOBS:,}")
    return [list(job) for job in itertools.product(*jobs.values())]


def repeated(words: Sequence[str]) -> list[Finding]:
    """Warnings of settings that are given more than once: Hydra takes the last."""
    found = parse(words)
    last = {override.key_or_group: override for override in found}
    counts = Counter(override.key_or_group for override in found)
    return [
        Finding(
            "repeated",
            "warning",
            name,
            f"it is given {count} times; {last[name].input_line} is taken",
        )
        for name, count in counts.items()
        if count > 1
    ]


def show(words: Sequence[str]) -> int:
    """Hydra's own options, such as `--cfg job`: prints what they ask for; the exit status."""

    @hydra.main(version_base=_VERSION, config_path=str(CONF), config_name="config")
    def nothing(_: DictConfig) -> None: ...

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here as they are, and leave in our words
    sys.argv[1:] = words
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            nothing()
    except SystemExit as end:
        if end.code == 2:  # argparse: its usage, and at the end what is wrong
            wrong = said.getvalue().strip().rpartition("error: ")[2]
            raise _refuse("", wrong, "see --help") from end
    except Exception as error:
        raise translate(error) from error
    print(said.getvalue(), end="", file=sys.stderr)
    return 0


def validate(composed: DictConfig) -> RunConfig:
    """The typed choice. Raises ChoiceError with all that is wrong in it."""
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise _referred(composed) or translate(error) from error
    assert isinstance(values, dict)
    return from_values({str(key): value for key, value in values.items()})


def _referred(composed: DictConfig) -> ChoiceError | None:
    """What is wrong in the model, whose recipe other settings refer to."""
    values = OmegaConf.to_container(composed, resolve=False)
    try:
        RunConfig.model_validate(values)
    except ValidationError as error:
        found = [f for f in _findings(error) if f.setting.partition(".")[0] == "model"]
        return ChoiceError(found) if found else None
    return None


def from_values(values: dict[str, Any]) -> RunConfig:
    """The same of nested dictionaries."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ChoiceError(list(_findings(error))) from error


# --- what the schema refuses ------------------------------------------------------------------


def _findings(error: ValidationError) -> Iterator[Finding]:
    seen, problems = set(), error.errors(include_url=False)
    missing: dict[str, list[str]] = {}
    for problem in problems:
        if problem["type"] == "missing":
            setting, _ = _setting([str(part) for part in problem["loc"]])
            missing.setdefault(setting.rpartition(".")[0], []).append(setting)
    for problem in problems:
        # A union reports each of its members; the setting is the part of named fields.
        setting, kind = _setting([str(part) for part in problem["loc"]])
        given = problem.get("input")
        if setting in seen:
            continue
        seen.add(setting)
        if problem["type"] == "extra_forbidden":
            yield _unknown(setting)
        elif problem["type"].startswith("union_tag"):  # of a file; the command line is refused
            fix = f"take one of {', '.join(_tags(setting))}"
            yield _finding(f"{setting}.{_tag(setting)}", "it is no kind that is known", fix)
        elif problem["type"] == "missing":
            group = setting.rpartition(".")[0]
            if len(lacking := missing[group]) > MANY:
                if lacking[0] == setting:
                    names = ", ".join(name.rpartition(".")[2] for name in lacking)
                    message = f"{len(lacking)} of its settings have no value: {names}"
                    yield _finding(group, message, f"start from another file of conf/{group}/")
                continue
            yield _finding(setting, "it has no value", _expected(setting, kind))
        else:
            words = _words(_annotation(setting, kind))
            near = did_you_mean(str(given), words) if isinstance(given, str) else ""
            yield _finding(
                setting,
                f"{_short(given)} is not legal{near}",
                (fix := _expected(setting, kind)) + _hint(setting, given, fix),
                id="illegal-value",
            )


def _setting(path: list[str]) -> tuple[str, str | None]:
    """(dotted setting, kind of its group) of an error's location: its longest part that is a
    setting, or an unknown name in a group."""
    kind = None
    if len(path) > 1 and _tag(path[0]):
        kind = path.pop(1)
    for end in range(len(path), 0, -1):
        name = ".".join(path[:end])
        if name in settings() or (end == len(path) and _is_group(".".join(path[:-1]))):
            return name, kind
    return ".".join(path), kind


def _tag(setting: str) -> str | None:
    """The field that says which of several models a group is; pydantic puts its value into an
    error's location."""
    field = RunConfig.model_fields.get(setting)
    return str(field.discriminator) if field is not None and field.discriminator else None


def _is_group(setting: str) -> bool:
    return setting == "" or bool(list(_models(_annotation(setting))))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from _models(part)


@cache
def settings(kind: str | None = None) -> dict[str, FieldInfo]:
    """Every setting's dotted name with its field, groups included.

    kind: the one of a group of several models; None: all, and of a name in several the first.
    """

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in model.model_fields.items():
            yield prefix + name, field
            for inner in _models(field.annotation):
                tag = inner.model_fields.get(_tag(name) or "") if not prefix else None
                if kind is None or tag is None or kind in _words(tag.annotation):
                    yield from walk(inner, f"{prefix}{name}.")

    found: dict[str, FieldInfo] = {}
    for name, field in walk(RunConfig, ""):
        found.setdefault(name, field)
    return found


def _tags(group: str, leaf: str = "") -> list[str]:
    """The kinds of a group that is one of several models: those that have `leaf`, or all."""
    tag = _tag(group)
    models = _models(settings()[group].annotation) if tag else ()
    return [
        word
        for model in models
        if not leaf or leaf in model.model_fields
        for word in _words(model.model_fields[tag or ""].annotation)
    ]


def _annotation(setting: str, kind: str | None = None) -> Any:
    field = settings(kind).get(setting)
    if field is None:
        return None
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _words(annotation: Any) -> list[str]:
    """The words of a setting that takes one of a few."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for part in get_args(annotation) for word in _words(part)]


def _expected(setting: str, kind: str | None = None) -> str:
    """'take a whole number from 1, or null': what the setting's type allows."""
    if inner := [s for s in settings() if s.rpartition(".")[0] == setting]:
        return f"it is a group: set {', '.join(inner)}"
    kinds = [
        kind.replace("NAME", setting) for kind in dict.fromkeys(_kinds(_annotation(setting, kind)))
    ]
    return f"take {' or '.join(kinds)}" if kinds else "see --cfg job"


def _kinds(annotation: Any) -> Iterator[str]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        number, *limits = parts
        bounds = [limit for found in limits for limit in getattr(found, "metadata", [found])]
        if any(getattr(bound, "pattern", None) for bound in bounds):
            yield 'a share such as "15%"'
        else:
            yield from (f"{kind}{_bounds(bounds)}" for kind in _kinds(number))
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _kinds(part)
    elif origin is Literal:
        yield f"one of {', '.join(map(str, parts))}"
    elif origin is list:
        yield "a list, 'NAME=[a,b]'"
    elif origin is dict:
        yield 'texts with names, \'NAME={a: "x", b: "y"}\''
    else:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text",
                 NoneType: "null"}  # fmt: skip
        if annotation in words:
            yield words[annotation]


def _bounds(bounds: Iterable[Any]) -> str:
    found = {
        name: getattr(bound, name)
        for bound in bounds
        for name in ("ge", "gt", "lt", "le")
        if getattr(bound, name, None) is not None
    }
    lower = f" from {found['ge']}" if "ge" in found else f" above {found['gt']}" * ("gt" in found)
    upper = f" below {found['lt']}" if "lt" in found else ""
    return lower + upper


def _hint(setting: str, given: Any, expected: str) -> str:
    if isinstance(given, int) and given > LARGEST:
        return f" to {LARGEST}"
    if isinstance(given, float) and given.is_integer() and abs(given) < 2**63:
        return f"; write {int(given)}"
    if isinstance(given, str) and given == "":
        return f"; {setting}=null where there is none" * ("null" in expected)
    return ""


def _short(value: Any) -> str:
    text = str(written(value)) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- what Hydra refuses -----------------------------------------------------------------------


def translate(error: Exception) -> ChoiceError:
    """Hydra's refusal of a command line, in our words."""
    text = str(error)
    if found := re.search(r"Could not find '([^']+)'", text):
        group, _, choice = found.group(1).partition("/")
        if legal := choices(group):
            message = f"there is no {choice!r}{did_you_mean(choice, legal)}"
            return _refuse(group, message, f"choose from {', '.join(legal)}")
    if found := re.search(r"Could not (?:override|delete)[^']*'([^'@=]*)", text):
        name, inner = found.group(1), getattr(error.__cause__, "full_key", None)
        if name in settings() and _has_names(name) and inner:
            name = str(inner)
        return ChoiceError(_unknown(name))
    if found := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '([^'=]+)=", text):
        return _refuse(
            found.group(1),
            "several values",
            "add -m for a job with each, or write a list as 'NAME=[a,b]' and a text with commas as "
            """'NAME="a,b"'""",
        )
    if found := re.search(r"(?:An item is already at|Multiple values for) '?([\w./]+\w)", text):
        return _refuse(found.group(1), "it is there already", "leave out the + before it")
    setting = str(getattr(error, "full_key", None) or "")
    cause = error.__cause__ or error
    if isinstance(cause, yaml.YAMLError):  # of a file in conf/
        return _refuse("", " ".join(str(cause).split()), "correct the file")
    if isinstance(cause, UnicodeDecodeError):  # of a file in conf/, which it does not name
        named = ", ".join(str(path) for path in sorted(CONF.rglob("*.yaml")) if not _is_text(path))
        return _refuse("", f"{named} is no text in UTF-8", "correct the file")
    line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    fix = _expected(setting) if setting in settings() else "see --help and --cfg job"
    return _refuse(setting, line, fix)


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _unreadable(word: str, error: Exception) -> Finding:
    """A word that is no `name=value`."""
    name, equals, value = word.lstrip("+~").partition("=")
    known = name if name in settings() or name in groups() else ""
    if not word.isprintable():
        return _finding(known, f"{_short(word)} has characters that no name has", "leave them out")
    if not equals:
        if name in groups():
            fix = f"write {name}=CHOICE, of {', '.join(choices(name))}"
        elif name in settings():
            fix = f"write {name}=VALUE"
        elif name and name[-1] in "]})'\"":
            fix = "quote a value with spaces for the shell: 'data.paths=[a, b]'"
        else:
            fix = "write GROUP=CHOICE or GROUP.SETTING=VALUE"
        return _finding("", f"{_short(word)} has no =", fix)
    if any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
        fix = "close its brackets, and quote a value with spaces for the shell: 'data.paths=[a, b]'"
    elif any(value.count(quote) % 2 for quote in "'\""):
        fix = "close its quotes; the shell takes one pair of them away: 'run_dir=\"a b\"'"
    elif not known:
        near = _nearest(name) if name else ""
        fix = f"write GROUP=CHOICE or GROUP.SETTING=VALUE{near}"
    elif value.startswith("="):
        fix = f"write one =: {name}=VALUE"
    elif isinstance(error, ValueError):  # Python's own, of a number
        fix = _expected(name)
    else:
        text = value if len(value) <= 60 and '"' not in value and "'" not in value else "VALUE"
        fix = f"""quote the value, and again for the shell: '{name}="{text}"'"""
    lines = [line for line in str(error).splitlines() if "evaluating" in line or "limit" in line]
    reason = f": {lines[0].rpartition(': ')[2]}" if lines else ""
    return _finding(known, f"{_short(word)} cannot be read{reason}", fix)


def _unknown(name: str) -> Finding:
    group, _, leaf = name.rpartition(".")
    if named := next((s for s in settings() if name.startswith(f"{s}.") and _has_names(s)), None):
        # Hydra refuses a name that is not in the file.
        return _finding(name, f"{named} has no such name yet", f"add it: +{name}=VALUE")
    if kinds := _tags(group, leaf) if name in settings() else []:
        # Another kind of the group is chosen.
        return _finding(name, f"it is a setting of {group}={', '.join(kinds)}",
                        f"choose {group}={kinds[0]}, or leave it out")  # fmt: skip
    if _tag(group):
        fix = f"conf/{group}/NAME.yaml has the settings of {group}=NAME"
    elif name in groups():  # a group of choices that set others, not one of settings
        fix = f"a file of conf/{name} starts with `# @package _global_`"
    elif inner := _leaves(group):
        fix = f"{group} has {', '.join(inner)}"
    else:
        fix = f"groups: {', '.join(groups())}; --cfg job prints all settings"
    what = "there is no such setting" if group else "there is no such group or setting"
    return _finding(name, f"{what}{_nearest(name)}", fix, id="unknown-setting")


def _has_names(setting: str) -> bool:
    """Whether a setting holds values under names of the user's."""
    annotation = _annotation(setting)
    return any(get_origin(part) is dict for part in (annotation, *get_args(annotation)))


def _leaves(group: str) -> list[str]:
    return [s.rpartition(".")[2] for s in settings() if group and s.rpartition(".")[0] == group]


def _nearest(name: str) -> str:
    """'; did you mean layout.tensor_parallel?', also where the group is left out or another."""
    group, _, leaf = name.rpartition(".")
    if near := _near(leaf, [s for s in settings() if s.rpartition(".")[0] == group]):
        return near
    if name in groups():
        return ""
    if not group and (near := did_you_mean(name, groups())):
        return near
    same = [s for s in settings() if leaf and (s == leaf or s.endswith(f".{leaf}"))]
    return f"; did you mean {' or '.join(same)}?" if same else _near(leaf, settings())


def _near(leaf: str, known: Iterable[str]) -> str:
    """The setting of `known` whose last part is nearest."""
    leaves = {setting.rpartition(".")[2]: setting for setting in known}
    near = nearest(leaf, leaves)
    return f"; did you mean {leaves[near]}?" if near else ""


def _finding(setting: str, message: str, fix: str, id: str = "command-line") -> Finding:
    return Finding(id, "error", setting, message, fix)


def _refuse(setting: str, message: str, fix: str) -> ChoiceError:
    return ChoiceError(_finding(setting, message, fix))
