"""Whether workers that failed are started again, decided alike on every host. Standard library
only.

Started again: a crash, a lost connection, NCCL's errors, a process that was killed: what a node
recovers from, going on from the newest checkpoint. Not: what would come again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from planning.findings import ChoiceError, MachineError
from training.torchrun import MAYBE_MEMORY, Failure

Kind = Literal["", "refused", "out of memory", "not finite", "disk full", "crash", "elsewhere"]
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|CUDA_ERROR_OUT_OF_MEMORY", re.IGNORECASE)
_NOT_FINITE = re.compile(r"FloatingPointError|\bnan\b|not finite|Unexpected result", re.IGNORECASE)
# What would come again, and how that is said; launch/aws/ends.py reads it back.
NEVER: Mapping[Kind, str] = {
    "refused": "it would be refused again",
    "out of memory": "it would run out of memory again",
    "not finite": "it would come again from the same checkpoint",
    "disk full": "the disk would be full again",
}
_LATER = 1e18  # for causes whose time is not known: after those that have one


@dataclass(frozen=True)
class End:
    """How one host's workers ended. time: of the cause, in seconds since 1970; step: the last one
    that this host has heard of; code: of the rank that failed first."""

    host: str
    status: Literal["done", "stopped", "failed"]
    message: str = ""
    exit_status: int = 0
    kind: Kind = ""
    rank: int | None = None
    code: int | None = None
    time: float = _LATER
    step: int = 0

    def to_entry(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> End:
        return cls(**entry)


def kind_of(failure: Failure, killed_for_memory: bool) -> Kind:
    """killed_for_memory: the kernel has killed a process of this container for its memory."""
    if failure.exit_status in (ChoiceError.exit_status, MachineError.exit_status):
        return "refused"
    if killed_for_memory and failure.code == -9:
        return "out of memory"
    return kind_of_words(f"{failure.error.get('type', '')} {failure.error.get('message', '')}")


def kind_of_words(what: str) -> Kind:
    """Of an error, by its type and message, or of a job's reason."""
    what = what.replace(MAYBE_MEMORY, "")  # a guess about any SIGKILL
    if _OUT_OF_MEMORY.search(what):
        return "out of memory"
    if _NOT_FINITE.search(what):
        return "not finite"
    return "crash"


def first_cause(ends: Sequence[End]) -> End:
    """The failure that the others follow from: a signal's victim, else the earliest."""
    failed = [end for end in ends if end.status == "failed"]
    own = [end for end in failed if end.kind != "elsewhere"] or failed
    killed = [end for end in own if end.code is not None and end.code < 0 and end.code != -15]
    return min(killed or own, key=lambda end: end.time)


def decide(
    ends: Sequence[End],
    failed_at: Sequence[int],
    max_restarts: int,
    *,
    possible: bool,
) -> tuple[bool, str]:
    """(start again?, why or why not) for workers of which some failed.

    failed_at: the steps of earlier failures of this job, one for each restart so far. possible:
    the hosts share the run folder, so that all can go on from one checkpoint.
    """
    cause = first_cause(ends)
    step = max(end.step for end in ends)
    if cause.kind in NEVER:
        return False, NEVER[cause.kind]
    if step in failed_at:
        return False, f"it failed after step {step} twice"
    if not possible:
        return False, "the hosts share no run folder, so none has the whole of a checkpoint"
    if len(failed_at) >= max_restarts:
        return False, f"{max_restarts} restarts are used up" if max_restarts else "max_restarts=0"
    return True, f"restart {len(failed_at) + 1} of {max_restarts}"
