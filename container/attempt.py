"""One start of the workers on this host, from torchrun's start to its end. Standard library only.

SIGTERM goes to the workers, which finish the step and save, and not to torchrun: it kills its
workers 30 s after its own SIGTERM, with no setting to change that (torch 2.11,
elastic/multiprocessing/api.py `close`), and a save may take longer.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from container.board import Board
from container.restart import End, first_cause, kind_of
from training import host, torchrun
from training.events import READY, EventReader, format_event, log_line
from training.orphans import descendants_end_here, terminate_children
from training.torchrun import MAYBE_MEMORY

_POLL = 0.1  # seconds
# SageMaker sends SIGKILL 120 s after SIGTERM (its guide on StopTrainingJob); what is left is for
# the reason and the log.
GRACE_S = 110.0
# For own workers to say what they saw of another host's failure, before they are ended.
ELSEWHERE_S = 15.0
# Bytes that a disk takes if it is not called full: a checkpoint's files are larger.
ROOM = 2**20
# A log line of every step would be too many for small models.
LINE_EVERY_S = 1.0


def say(text: str) -> None:
    """Print; a reader that went away (a closed terminal) does not end the training."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class StopRequest:
    """A wish to stop, by SIGTERM, SIGINT or SIGHUP or because the capacity ends, while it is
    entered. A SIGHUP that is ignored already (nohup) stays so."""

    def __init__(
        self, grace_s: float = GRACE_S, leave_at: float | None = None, leave_grace_s: float = 0
    ) -> None:
        """grace_s: seconds to save in after a signal. leave_at: when the capacity is to be left,
        in seconds since 1970, and leave_grace_s: how long that may take; None: never."""
        self._grace, self._leave_at, self._leave_grace = grace_s, leave_at, leave_grace_s
        self._signal, self._signal_at = 0, 0.0

    def __enter__(self) -> Self:
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        if not self._signal:
            self._signal, self._signal_at = number, time.monotonic()

    @property
    def reason(self) -> str:
        """Why to stop; "" while there is none."""
        if self._signal:
            return f"{signal.Signals(self._signal).name} from outside"
        if self._leave_at is not None and time.time() >= self._leave_at:
            return "the capacity that the job runs in ends soon"
        return ""

    def wanted(self) -> bool:
        return bool(self.reason)

    def overdue(self) -> bool:
        """Whether the time to save in is over."""
        if self._signal:
            return time.monotonic() - self._signal_at > self._grace
        return self._leave_at is not None and time.time() > self._leave_at + self._leave_grace


class Narrator:
    """Prints a run's events for the job's log, and keeps what is known of its progress.

    aloud: else nothing is printed, because another host prints the same file.
    """

    def __init__(self, path: Path, aloud: bool) -> None:
        self._reader, self._aloud = EventReader(path), aloud
        self._printed, self._unprinted = 0.0, ""
        self.ready = False
        self.step = 0
        self.checkpoint: str | None = None

    def new(self) -> None:
        for event in self._reader.read():
            self.ready |= event["event"] in READY
            if event["event"] == "step":
                self._step(event)
                continue
            if event["event"] == "checkpoint":
                self.checkpoint = str(event["path"])
            if text := log_line(event) or format_event(event):
                self.flush()
                self._say(text)

    def _step(self, event: Mapping[str, Any]) -> None:
        first, self.step = not self._printed, int(event["step"])
        self._unprinted = log_line(event)
        last = event["step"] == event.get("train_steps")
        if first or last or time.monotonic() - self._printed >= LINE_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Print the last step if its line was left out."""
        if self._unprinted:
            self._say(self._unprinted)
            self._unprinted, self._printed = "", time.monotonic()

    def _say(self, text: str) -> None:
        if self._aloud:
            say(text)


def run(
    command: list[str],
    environment: Mapping[str, str],
    run_dir: Path,
    *,
    log_name: str,
    board: Board,
    number: int,
    stop: StopRequest,
    aloud: bool,
) -> End:
    """Start `command`, a torchrun of the run in `run_dir`, and see it to its end.

    number: of this start in the job. aloud: print what the workers tell. No process of it is left.
    """
    logs = run_dir / "logs"
    log_path = logs / log_name
    log_start = log_path.stat().st_size if log_path.exists() else 0
    told = Narrator(logs / "events.jsonl", aloud)
    kills = host.out_of_memory_kills()
    with descendants_end_here(), open(log_path, "ab") as log:
        process = subprocess.Popen(
            command,
            env=torchrun.environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = _watch(process, told, board, number, stop)
    told.new()
    told.flush()
    if ended is None:
        with open(log_path, "rb") as file:
            file.seek(log_start)
            said = file.read().decode(errors="replace")
        ended = _judge(process.returncode, said, run_dir, log_name, board.me, stop, kills)
    return replace(ended, step=told.step)


def _watch(
    process: subprocess.Popen[bytes],
    told: Narrator,
    board: Board,
    number: int,
    stop: StopRequest,
) -> End | None:
    """Pass events, stop wishes and other hosts' failures on; None when torchrun ends by itself,
    else how it is to be ended."""
    asked, elsewhere_since = False, 0.0
    me = board.me
    while process.poll() is None:
        told.new()
        board.exchange()
        if told.ready and not board.entries(f"ready {number}"):
            board.put(f"ready {number}", {})
        others = [End.of_entry(e) for e in board.entries(f"end {number}").values()]
        if any(end.status == "failed" for end in others):
            elsewhere_since = elsewhere_since or time.monotonic()
            if time.monotonic() - elsewhere_since > ELSEWHERE_S:
                cause = first_cause(others)
                return End(me, "failed", f"{cause.host} failed first", 1, "elsewhere")
        if stop.wanted():
            if not asked and not board.entries(f"ready {number}"):
                say(f"stopping at once, nothing is trained yet: {stop.reason}")
                return End(me, "stopped", f"stopped before the first step: {stop.reason}", 143)
            if not asked:
                asked = True
                say(f"finishing the step and saving: {stop.reason}")
                terminate_children(process.pid)
            elif stop.overdue():
                message = "the workers did not finish saving in time"
                return End(me, "failed", message, 1, "crash", time=time.time())
        time.sleep(_POLL)
    return None


def _judge(
    returncode: int, said: str, run_dir: Path, log_name: str, me: str, stop: StopRequest, kills: int
) -> End:
    """How a torchrun that ended by itself did."""
    result = torchrun.read_json(run_dir / "result.json")
    if returncode == 0 and result.get("status") == "stopped":
        return End(me, "stopped", f"stopped and saved: {stop.reason}", 143)
    # Where hosts share no folder the first one alone has the result.
    if returncode == 0 and result.get("status") in ("done", None):
        return End(me, "done")
    failure = torchrun.failure(run_dir / "logs", returncode, said, log_name)
    kind = kind_of(failure, host.out_of_memory_kills() > kills)
    if trace := str(failure.error.get("traceback", "")):
        say(f"rank {failure.rank}:\n{trace.rstrip()}")
    message = str(failure)
    if kind == "out of memory":
        message = message.replace(MAYBE_MEMORY, "the kernel ran out of memory for this container")
    elif kind == "crash" and _is_full(run_dir):
        kind, message = "disk full", f"the disk of {run_dir} is full: {message}"
    return End(
        me,
        "failed",
        message,
        failure.exit_status,
        kind,
        failure.rank,
        failure.code,
        float(failure.error.get("time", time.time())),
    )


def _is_full(folder: Path) -> bool:
    """Tried, as file systems and quotas do not all tell what is free."""
    probe = folder / f".room-{os.getpid()}"
    try:
        with open(probe, "wb") as file:
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        with suppress(OSError):
            probe.unlink()
    return False
