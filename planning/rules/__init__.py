"""Which choices are legal together: each rule with its reason, its way out and its source.

A rule is a function of the Facts that yields (setting, message, fix); `check` runs them all, so a
person sees every finding at once. Sources name the file of megatron-core 0.19.2 or of Transformer
Engine 2.20 that makes the rule, or the reason where none of them checks it.
"""

from __future__ import annotations

from planning.findings import Finding

# The rooms of the rules, in the order in which findings are shown; importing one adds its rules.
from planning.rules import (  # noqa: F401  isort: skip
    model,
    parallel,
    precision,
    shapes,
    sharding,
    recompute,
    graph,
    training,
    hardware,
)
from planning.rules.base import RULES, Facts, Rule
from planning.rules.recompute import RECOMPUTE_MODULES

__all__ = ["RECOMPUTE_MODULES", "RULES", "Facts", "Rule", "check"]


def check(facts: Facts) -> list[Finding]:
    """All findings of all rules."""
    here = facts.config.hardware.name == "this"
    return [
        Finding(r.id, r.severity, setting, message, fix, r.source, r.of_machine and here)
        for r in RULES
        for setting, message, fix in r.verdicts(facts)
    ]
