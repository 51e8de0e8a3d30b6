"""What a rule is, and the facts that it is asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from planning.hardware import GPUS, Gpu
from planning.pattern import blocks
from planning.schema import LayoutConfig, RunConfig

Verdict = tuple[str, str, str]  # setting, message, fix


@dataclass(frozen=True)
class Facts:
    """A choice with its layout completed, and what the rules ask of it."""

    config: RunConfig
    layout: LayoutConfig
    blocks: list[str]  # one string of symbols each (planning/pattern.py)

    @classmethod
    def of(cls, config: RunConfig) -> Facts:
        """Of a choice whose layout is complete. Raises ChoiceError: an impossible pattern."""
        model = config.model
        return cls(config, config.layout, blocks(model.pattern, model.num_layers))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @cached_property
    def gpu(self) -> Gpu:
        return GPUS[self.config.hardware.gpu or "cpu"]

    @property
    def tp(self) -> int:
        return self.layout.tensor_parallel or 1

    @property
    def pp(self) -> int:
        return self.layout.pipeline_parallel or 1

    @property
    def vpp(self) -> int:
        return self.layout.virtual_pipeline_parallel or 1

    @property
    def cp(self) -> int:
        return self.layout.context_parallel or 1

    @property
    def ep(self) -> int:
        return self.layout.expert_parallel or 1

    @property
    def world_size(self) -> int:
        return (self.config.hardware.gpus_per_node or 1) * self.config.hardware.nodes

    @property
    def data_parallel(self) -> int:
        return max(1, self.world_size // (self.tp * self.pp * self.cp))

    def consists_of(self, layers: str) -> bool:
        """Whether the model has no other layers than these, given by their symbols."""
        return set("".join(self.blocks)) <= set(layers) and self.config.model.formulas is None

    @property
    def bf16_blocks(self) -> tuple[int, int]:
        """Blocks in BF16 at the start and at the end; a share is rounded up."""
        precision, blocks = self.config.precision, self.num_blocks

        def count(value: int | str) -> int:
            return value if isinstance(value, int) else -(-blocks * int(value[:-1]) // 100)

        return count(precision.layers_in_bf16_at_start), count(precision.layers_in_bf16_at_end)


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Literal["error", "warning"]
    source: str
    # Breaking it says that this machine cannot, where the hardware is the one found here.
    of_machine: bool
    verdicts: Callable[[Facts], Iterable[Verdict]]


RULES: list[Rule] = []


def rule(
    id: str,
    source: str,
    *,
    severity: Literal["error", "warning"] = "error",
    of_machine: bool = False,
) -> Callable[[Callable[[Facts], Iterable[Verdict]]], Callable[[Facts], Iterable[Verdict]]]:
    def add(verdicts: Callable[[Facts], Iterable[Verdict]]) -> Callable[[Facts], Iterable[Verdict]]:
        RULES.append(Rule(id, severity, source, of_machine, verdicts))
        return verdicts

    return add


def divisors(number: int, up_to: int = 128) -> str:
    """'1, 2 or 4': what divides `number`, up to `up_to`, for a message."""
    found = [str(n) for n in range(1, min(number, up_to) + 1) if number % n == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
