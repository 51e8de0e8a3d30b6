"""Starting torchrun, and saying how it failed: the same for every way of starting a run.

Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planning.findings import ChoiceError, MachineError
from training.orphans import LAUNCHER_PID

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 400  # characters of an error that is shown; the log has the rest
MAYBE_MEMORY = "often the machine ran out of memory (the kernel's log says so)"
# Deaths that are a cause; SIGTERM and SIGABRT often follow from another rank's failure.
_CAUSES = {
    signal.SIGKILL: MAYBE_MEMORY,
    signal.SIGSEGV: "a fault in native code",
    signal.SIGBUS: "often /dev/shm is full",
    signal.SIGILL: "a library built for another processor",
    signal.SIGFPE: "an arithmetic fault in native code",
}


def command(
    *, processes: int, worker: str, run_dir: Path, rendezvous: Sequence[str], nodes: int = 1
) -> list[str]:
    """torchrun for `processes` ranks here; it ends with this process, however that one ends.

    rendezvous: torchrun's options that say where the `nodes` meet. worker: the module that each
    rank runs, with run_dir as its argument.
    """
    return [
        *(sys.executable, "-m", "training.orphans", str(os.getpid())),
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(nodes), "--nproc-per-node", str(processes), "--max-restarts", "0"),
        *rendezvous,
        *("-m", worker, str(run_dir)),
    ]


def alone(port: int = 0) -> list[str]:
    """The rendezvous of one node; port 0: the store takes a free one, as --standalone does."""
    return [
        *("--rdzv-backend", "c10d", "--rdzv-id", uuid.uuid4().hex),
        *("--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--local-addr", "127.0.0.1"),  # else the host's name, which may not resolve
    ]


def among(first: str, port: int, rank: int, name: str) -> list[str]:
    """The rendezvous of several nodes whose order is known: ranks 0, 1, ... are on the first."""
    return [
        *("--rdzv-backend", "static", "--rdzv-id", name, "--node-rank", str(rank)),
        *("--master-addr", first, "--master-port", str(port)),
    ]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `more`, and what finding the worker's module takes."""
    merged = {**os.environ, **more}
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), merged.get("PYTHONPATH")]))
    merged["PYTHONSAFEPATH"] = "1"  # a folder named training/ where we were called is not ours
    merged[LAUNCHER_PID] = str(os.getpid())
    return merged


@dataclass(frozen=True)
class Failure:
    """How a torchrun failed.

    exit_status: 2 or 3 where a worker refused, else 1. rank and code: of the rank that failed
    first, code -n for signal n. error: what that rank wrote of it (training/worker.py).
    """

    message: str
    exit_status: int = 1
    log: str = ""
    rank: int | None = None
    code: int | None = None
    error: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.message}\n    {self.log}" if self.log else self.message


def failure(logs: Path, returncode: int, said: str, log: str = "torchrun.log") -> Failure:
    """Why a torchrun that ended by itself failed: the rank that failed first, and how.

    logs: the run's. said: all that this torchrun printed, into the file `log` there.
    """
    # torchrun prints, for each rank that it saw fail: "rank : 1 (local_rank: 1)",
    # "exitcode : -9 (pid: 7)" (torch/distributed/elastic/multiprocessing/errors), the first last.
    seen = re.findall(r"rank +: (\d+) \(local_rank.*\n +exitcode +: (-?\d+)", said)
    deaths = [(int(rank), int(code)) for rank, code in seen]
    for rank, code in deaths:
        if code < 0 and -code in _CAUSES:
            return Failure(_killed(f"rank {rank}", -code), 1, _of_rank(logs, rank), rank, code)
    errors = [read_json(path) for path in logs.glob("error-rank-*.json")]
    errors = [error for error in errors if "rank" in error]
    if errors:
        first = min(errors, key=lambda error: error.get("time", 0))
        rank, status = int(first["rank"]), first.get("exit_status")
        if status in (ChoiceError.exit_status, MachineError.exit_status):
            return Failure(str(first.get("message")), status, "", rank, status, first)
        message = f"rank {rank} failed: {first.get('type')}: {_short(str(first.get('message')))}"
        return Failure(message, 1, _of_rank(logs, rank), rank, 1, first)
    if deaths:
        rank, code = deaths[-1]
        how = (
            _killed(f"rank {rank}", -code)
            if code < 0
            else f"rank {rank} ended with exit status {code}"
        )
        last = last_line(logs / f"rank-{rank}.log")
        return Failure(f"{how}; it last said: {last}", 1, _of_rank(logs, rank), rank, code)
    if returncode < 0:
        return Failure(_killed("torchrun", -returncode))
    if returncode > 0:
        return Failure(f"torchrun failed: {last_line(logs / log)}", 1, f"logs: {logs}")
    return Failure("the processes ended without a result", 1, f"logs: {logs}")


def _short(message: str) -> str:
    """A message with other ranks' stack traces in it (torch's CheckpointException): what it is,
    and the last trace's own error. The log has all."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) < 2 or "Traceback (most recent call last)" not in message:
        return message
    error = lines[-1] if len(lines[-1]) <= LONGEST else f"{lines[-1][:LONGEST]}..."
    return f"{lines[0]}: {error}"


def _of_rank(logs: Path, rank: int) -> str:
    return f"log: {logs}/rank-{rank}.log"


def _killed(what: str, number: int) -> str:
    cause = _CAUSES.get(signal.Signals(number)) if number in set(signal.Signals) else None
    return f"{what} was killed by signal {number}" + (f": {cause}" if cause else "")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def last_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return "(no log)"
    return next((line.strip() for line in reversed(lines) if line.strip()), "(nothing)")
