"""What a check has to say, and the two ways in which a run is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """One thing found: what is wrong, which setting, what would do, and where the rule is from."""

    id: str
    severity: Literal["error", "warning"]
    setting: str
    message: str
    fix: str = ""
    source: str = ""
    machine: bool = False  # legal elsewhere: this machine cannot run it

    def __str__(self) -> str:
        text = f"{self.setting}: {self.message}" if self.setting else self.message
        return f"{text}\n    {self.fix}" if self.fix else text


class Refusal(Exception):
    """A run that does not start; `exit_status` is the process's."""

    exit_status = 1
    ways_on = ""  # said after the findings
    predicted: Mapping[str, Any] = MappingProxyType({})  # of a plan that is refused

    def __init__(self, findings: Finding | Iterable[Finding]) -> None:
        self.findings = [findings] if isinstance(findings, Finding) else list(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))


def errors(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]


def refuse(findings: Iterable[Finding]) -> None:
    """Raise on errors: ChoiceError if any is wrong wherever it runs, else MachineError."""
    found = errors(findings)
    if any(not finding.machine for finding in found):
        raise ChoiceError(found)
    if found:
        raise MachineError(found)


class ChoiceError(Refusal):
    """The choice is wrong wherever it runs."""

    exit_status = 2


class MachineError(Refusal):
    """The choice is legal, but the machine that should run it now cannot."""

    exit_status = 3


def written(value: Any) -> Any:
    """A value as it is written in a choice: null, true, false."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is nearest to a mistyped one, if any is near."""
    words = list(known)
    near = get_close_matches(word, words, n=1, cutoff=0.6)
    return next(iter(near or [one for one in words if one.lower() == word.lower()]), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest known word, else ''."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""
