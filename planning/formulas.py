"""Arithmetic over a model's fields, for blocks whose cost this repository does not know.

A formula is numbers, the model's numeric fields, `+ - * / // **`, parentheses, and `min`, `max`,
`ceil`. It is read as a syntax tree, never executed, and computed in exact fractions.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

from planning.findings import ChoiceError, Finding, did_you_mean
from planning.schema import ModelConfig

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_FUNCTIONS: dict[str, Callable[..., Fraction | int]] = {
    "min": min,
    "max": max,
    "ceil": math.ceil,
}
_GRAMMAR = "numbers, the model's fields, + - * / // ** ( ), min, max and ceil"
_LARGEST_EXPONENT = 8  # keeps a slip such as 9**9**9 from computing for hours


def head_dim(model: ModelConfig) -> int:
    """Elements of one attention head (`kv_channels`)."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def fields(model: ModelConfig) -> dict[str, Fraction]:
    """What a formula may name: the model's numeric fields; `kv_channels` is never null here."""
    numbers = {
        name: Fraction(str(value))
        for name, value in model
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return numbers | {"kv_channels": Fraction(head_dim(model))}


def evaluate(formula: str, values: Mapping[str, Fraction], setting: str) -> Fraction:
    """The formula's exact value.

    `setting` is where it was written, for the error. Raises ChoiceError: not arithmetic, an unknown
    field, a division by zero, a negative result.
    """

    def error(message: str, fix: str) -> ChoiceError:
        return ChoiceError(Finding("formula", "error", setting, f"{formula!r}: {message}", fix))

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return Fraction(str(number))
            case ast.Name(id=name):
                if name in values:
                    return values[name]
                raise error(
                    f"{name} is no numeric field of this model{did_you_mean(name, values)}",
                    f"the fields are {', '.join(sorted(values))}",
                )
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                base, exponent = value(left), value(right)
                if exponent not in range(_LARGEST_EXPONENT + 1):
                    raise error(
                        f"the exponent {exponent} is too much",
                        f"take a whole one from 0 to {_LARGEST_EXPONENT}",
                    )
                return base ** int(exponent)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                operands = value(left), value(right)
                if isinstance(op, ast.Div | ast.FloorDiv) and operands[1] == 0:
                    raise error(f"{ast.unparse(right)} is zero", "divide by something else")
                return Fraction(_OPERATORS[type(op)](*operands))
            case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if (
                name in _FUNCTIONS and (len(args) == 1) == (name == "ceil")
            ):
                numbers = [value(argument) for argument in args]
                return Fraction(_FUNCTIONS[name](*numbers))
        raise error(f"{ast.unparse(node)} is not arithmetic", f"write it with {_GRAMMAR}")

    try:
        tree = ast.parse(" ".join(formula.split()), mode="eval")
    except SyntaxError as fault:
        raise error(f"not an expression ({fault.msg})", f"write it with {_GRAMMAR}") from None
    result = value(tree.body)
    if result < 0:
        raise error(f"it gives {float(result):g}, below zero", "correct it")
    return result
