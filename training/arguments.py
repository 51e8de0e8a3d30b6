"""The plan's argument list as Megatron's arguments, with nothing changed in silence."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from planning.findings import ChoiceError, Finding
from planning.plan import expand


def parse(arguments: Sequence[str], roots: Mapping[str, str]) -> Namespace:
    """Megatron's validated arguments; its global state is set.

    Raises ChoiceError where Megatron rejects the arguments, or gives one of them another value than
    the plan does.
    """
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    given = [expand(argument, roots) for argument in arguments]
    sys.argv = ["training.worker", *given]
    args = parse_args()
    asked = deepcopy(vars(args))
    try:
        validate_args(args)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise ChoiceError(
            Finding("megatron", "error", "", f"Megatron rejects this plan: {error}")
        ) from error
    changed = forced(given, asked, vars(args))
    if changed:
        raise ChoiceError(changed)
    set_global_variables(args)
    return args


def forced(
    given: Sequence[str], asked: Mapping[str, Any], validated: Mapping[str, Any]
) -> list[Finding]:
    """What Megatron changed of the given options. `asked`, `validated`: values by name."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    findings = []
    for option in dict.fromkeys(word for word in given if word.startswith("--")):
        name = parser._option_string_actions[option].dest
        before, after = asked.get(name), validated.get(name)
        if plain(before) != plain(after):
            findings.append(
                Finding("forced", "error", "", f"Megatron turns {option} {before} into {after}")
            )
    return findings


# What Megatron maps names of types to (arguments.py, validate_args).
_TYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
    "None": "auto",
}


def plain(value: Any) -> Any:
    """A value of Megatron's arguments as it stands on the command line: types by their names, a
    list of one element as this element. Both are what Megatron makes of them without a change."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    return _TYPES.get(str(value), value)
