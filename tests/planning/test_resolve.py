"""resolve takes any choice: it says what is wrong and what would do, and never raises."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings

from planning.findings import errors
from planning.resolve import resolve
from tests.planning.generated import build, choices, words


@settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(choices())
def test_any_choice_has_a_plan_or_reasons(
    choice: tuple[dict[str, str], list[tuple[str, Any]]],
) -> None:
    resolution = resolve(build(*choice))
    found = resolution.findings
    assert all(f.setting and f.message and f.fix for f in found), words(*choice)
    if not errors(found):
        assert resolution.plan is not None, words(*choice)
        assert resolution.held is not None, words(*choice)
