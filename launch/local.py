"""Runs a plan here: starts torchrun, watches it, stops it, and says how it ended.

Process tree: launcher -> torchrun -> one worker per rank -> data loaders.

Why not NeMo-Run's LocalExecutor: SIGTERM to its launcher orphans torchrun and leaves the status
at RUNNING, another process cannot cancel (KeyError), and it notes success for failed jobs too
(nemo-run 0.11.1). Here
- a first SIGTERM, SIGINT or SIGHUP is passed to the workers only, which finish the step and save.
  torchrun is not signalled: it kills its workers 30 s after its own SIGTERM, with no setting to
  change that (torch 2.11, elastic/multiprocessing/api.py `close`), and a save may take longer;
- nothing outlives the launcher, even one killed with -9: the kernel kills torchrun with it, and
  the workers with torchrun (training/orphans.py).
"""

from __future__ import annotations

import errno
import json
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from launch.display import Display
from launch.run_folder import begin
from planning.findings import ChoiceError, Finding, MachineError
from training import torchrun
from training.events import READY, EventReader
from training.orphans import descendants_end_here, terminate_children

STOPPED = 143  # 128 + SIGTERM, as a shell says it
_POLL = 0.1  # seconds
# A supervisor that signals both a process group and its leader (make, uv) repeats one request.
_ONE_REQUEST = 0.5  # seconds


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the process's exit status, what to tell the person, and result.json."""

    status: Literal["done", "submitted", "stopped", "failed"]
    exit_status: int
    message: str
    result: dict[str, Any]


def run(
    run_dir: Path,
    *,
    processes: int,
    environment: Mapping[str, str],
    port: int,
    display: Display,
    worker: str = "training.worker",
) -> Outcome:
    """Train the plan in `run_dir` in `processes` processes on this machine, to its end.

    environment: added to this process's own. port: of the rendezvous; 0 takes a free one.
    worker: the module that each process runs, with run_dir as its argument.
    Raises MachineError if the port is taken. Call it from the main thread, which handles signals.
    """
    check_port(port)
    begin(run_dir)
    told = _Told(run_dir / "logs" / "events.jsonl", display)
    log_path = run_dir / "logs" / "torchrun.log"
    log_start = log_path.stat().st_size if log_path.exists() else 0
    display.phase(f"starting {processes} process{'es' if processes > 1 else ''}")
    with _StopRequests() as stop, descendants_end_here(), open(log_path, "ab") as log:
        process = subprocess.Popen(
            torchrun.command(
                processes=processes,
                worker=worker,
                run_dir=run_dir.resolve(),
                rendezvous=torchrun.alone(port),
            ),
            env=torchrun.environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal reaches the launcher only
        )
        ended_by_itself = _watch(process, told, stop, display)
    told.show_new()
    display.close()
    if ended_by_itself:
        with open(log_path, "rb") as file:
            file.seek(log_start)
            torchrun_log = file.read().decode(errors="replace")
        outcome = _judge(run_dir, process.returncode, torchrun_log)
    else:
        outcome = Outcome("stopped", STOPPED, "stopped at once, without saving", {})
    return _with_result(outcome, run_dir, told.progress)


def check_port(port: int) -> None:
    """ChoiceError for an impossible port, MachineError for one that this machine cannot give."""
    if port > 65535:
        raise ChoiceError(
            Finding("port", "error", "launch.port", f"{port} is not a port", "at most 65535")
        )
    if port == 0:
        return
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As the store does: a port that was just released is free, one in use is not.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # no IPv6 here
                continue
            raise MachineError(
                Finding(
                    id="port_taken",
                    severity="error",
                    setting="launch.port",
                    message=f"port {port} cannot be used: {error.strerror}",
                    fix="choose another port, or launch.port=0 for any free one",
                )
            ) from None


class _StopRequests:
    """Counts requests to stop, by SIGINT, SIGTERM or SIGHUP, while it is entered."""

    def __init__(self) -> None:
        self.count = 0
        self._last = float("-inf")

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        now = time.monotonic()
        if now - self._last > _ONE_REQUEST:
            self.count += 1
        self._last = now


class _Told:
    """What the workers have told so far, each event shown as it comes."""

    def __init__(self, path: Path, display: Display) -> None:
        self._reader, self._display = EventReader(path), display
        self.ready = False  # the workers handle SIGTERM
        self.progress: dict[str, Any] = {}  # in the words of result.json

    def show_new(self) -> None:
        for event in self._reader.read():
            self.ready |= event["event"] in READY
            if event["event"] == "step":
                self.progress |= {"steps": event["step"], "final_loss": event["loss"]}
            elif event["event"] == "checkpoint":
                self.progress["checkpoint"] = event["path"]
            self._display.event(event)


def _watch(
    process: subprocess.Popen[bytes], told: _Told, stop: _StopRequests, display: Display
) -> bool:
    """Show events and pass on stop requests until torchrun ends; False if it is to be killed."""
    asked = False
    while process.poll() is None:
        told.show_new()
        if stop.count > 1 or (stop.count and not told.ready):
            display.message("stopping at once")
            return False
        if stop.count and not asked:
            asked = True
            display.message("finishing the step and saving; press Ctrl-C again to stop at once")
            terminate_children(process.pid)
        display.tick()
        time.sleep(_POLL)
    return True


def _judge(run_dir: Path, returncode: int, torchrun_log: str) -> Outcome:
    """The outcome of a torchrun that ended by itself."""
    result = torchrun.read_json(run_dir / "result.json")
    if returncode == 0 and result.get("status") == "done":
        return Outcome("done", 0, "", result)
    if returncode == 0 and result.get("status") == "stopped":
        return Outcome("stopped", STOPPED, result.get("message", ""), result)
    failure = torchrun.failure(run_dir / "logs", returncode, torchrun_log)
    return Outcome("failed", failure.exit_status, str(failure), result)


def _with_result(outcome: Outcome, run_dir: Path, progress: Mapping[str, Any]) -> Outcome:
    """The outcome, with a result.json that agrees where the workers wrote none."""
    if outcome.result.get("status") == outcome.status:
        return outcome
    end = {"status": outcome.status, "message": outcome.message}
    result = {**progress, **outcome.result, **end}
    path, message = run_dir / "result.json", outcome.message
    try:
        path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:  # a full disk, most often what ended the run
        message = f"{message}\ncannot write to {path}: {error.strerror}"
    return Outcome(outcome.status, outcome.exit_status, message, result)
