"""Why a training job ended, and whether to submit it again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from container.restart import NEVER, kind_of_words
from launch.aws.job import Described
from planning.findings import ChoiceError, MachineError

Kind = Literal[
    "completed",
    "stopped",
    "time limit",
    "no capacity",
    "service",
    "account",
    "refused",
    "node",
    "out of memory",
    "not finite",
    "crash",
]
STOPPED = 143  # the exit status of a run that has saved and stopped
# Seconds until the next try: capacity comes back slowly.
WAITS: dict[Kind, float] = {"no capacity": 600, "service": 60, "node": 30, "crash": 10}
_NEVER: dict[str, str] = {
    **{str(kind): why for kind, why in NEVER.items()},
    "completed": "the run is done",
    "stopped": "it was stopped",
    "time limit": "its time was up",
    "account": "what it names has to change first",
}
# The first process's own decision, at the end of what it writes (container/restart.py).
_NOTE = re.compile(r"not started again: (.*?)(?:, exit code.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class End:
    """step: the last one that the log tells of; None before the first."""

    kind: Kind
    reason: str
    step: int | None = None

    def __str__(self) -> str:
        at = f", after step {self.step}" if self.step is not None else ""
        reason = "; ".join(filter(None, (line.strip() for line in self.reason.splitlines())))
        return f"{self.kind}{at}: {reason}" if reason else f"{self.kind}{at}"


class Ended(TypedDict):
    """An End as it is kept in job.json."""

    kind: Kind
    reason: str
    step: int | None


def of(job: Described, step: int | None = None) -> End:
    """Of a job that has ended. step: the last one in its log."""
    reason = str(job.get("FailureReason", "")).strip()
    match job["TrainingJobStatus"], job.get("SecondaryStatus"):
        case "Completed", _:
            return End("completed", "", step)
        case _, "MaxRuntimeExceeded":
            return End("time limit", "launch.max_run_hours is over", step)
        case _, "MaxWaitTimeExceeded":
            return End("time limit", "launch.max_wait_hours is over", step)
        case "Stopped", _:
            return End("stopped", reason, step)
    return End(_failed(reason), reason, step)


def _failed(reason: str) -> Kind:
    """What a FailureReason stands for: its first word is SageMaker's, the rest of an
    AlgorithmError is what the first process wrote, and its exit status."""
    if reason.startswith("InternalServerError"):
        return "service"
    if (
        re.match(r"CapacityError|InsufficientCapacity", reason)
        or "capacity error" in reason.lower()
    ):
        return "no capacity"
    if reason.startswith("ClientError"):
        return "account"
    exit_status = exit_status_of(reason)
    if exit_status == STOPPED:
        return "stopped"
    if exit_status == ChoiceError.exit_status:
        return "refused"
    if exit_status == MachineError.exit_status:
        return "node"
    note = _note(reason)
    for kind in ("refused", "out of memory", "not finite"):
        if note == NEVER[kind]:
            return kind
    # A rank that was killed by signal 9 may have been: the first process has looked.
    return "crash" if note or "killed by signal" in reason else _of_words(reason)


def _of_words(reason: str) -> Kind:
    kind = kind_of_words(reason)
    return kind if kind in ("out of memory", "not finite") else "crash"


def _note(reason: str) -> str:
    found = _NOTE.search(reason)
    return found[1].strip() if found else ""


def exit_status_of(reason: str) -> int | None:
    """'AlgorithmError: ..., exit code: 137' -> 137"""
    found = re.search(r"exit code:? (\d+)\s*$", reason, re.IGNORECASE)
    return int(found[1]) if found else None


def would_come_again(end: End) -> str:
    """Why the same request cannot do better, or ""."""
    return _NEVER[end.kind] if end.kind in (*NEVER, "completed") else ""


def again(end: End, earlier: Sequence[End], restarts: int, max_restarts: int) -> tuple[bool, str]:
    """(submit again?, why or why not). earlier: how the run's jobs before this one ended."""
    if why := _NEVER.get(end.kind):
        return False, why
    if (note := _note(end.reason)) and re.search(r" twice$|used up$|max_restarts=0$", note):
        return False, note
    if end.kind in ("crash", "node"):
        same = [e for e in earlier if e.kind == end.kind and e.step == end.step]
        if same:
            at = "before the first step" if end.step is None else f"after step {end.step}"
            return False, f"it failed {at} twice"
    if restarts >= max_restarts:
        used = f"{max_restarts} restarts are used up" if max_restarts else "launch.max_restarts=0"
        return False, used
    return True, f"restart {restarts + 1} of {max_restarts}"


def to_record(end: End) -> Ended:
    return {"kind": end.kind, "reason": end.reason, "step": end.step}


def of_record(entry: Ended) -> End:
    return End(entry["kind"], entry["reason"], entry["step"])
