"""One start of workers, with a small program in torchrun's place that costs no import of torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from container import attempt
from container.attempt import StopRequest
from container.board import Board
from container.restart import End
from training.events import EventLog

# As torchrun: waits for its workers, and ends with the status of one that failed.
TORCHRUN = """
    import os, signal, subprocess, sys, time
    worker = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
    sys.exit(worker.wait())
"""
IMPORTS = """
    import json, os, pathlib, signal, sys, time
    run_dir = pathlib.Path(sys.argv[1])
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    from training.events import EventLog
    events = EventLog(run_dir / "logs" / "events.jsonl")
"""


def run(tmp_path: Path, worker: str, stop: StopRequest, **more: object) -> End:
    (tmp_path / "logs").mkdir(exist_ok=True)
    program, code = textwrap.dedent(TORCHRUN), textwrap.dedent(IMPORTS) + textwrap.dedent(worker)
    with stop, Board(("a",), "a", 0, "job") as board:
        return attempt.run(
            [sys.executable, "-c", program, str(tmp_path), code],
            {},
            tmp_path,
            log_name="torchrun.log",
            board=board,
            number=0,
            stop=stop,
            aloud=True,
        )


def signal_me_when(path: Path, text: str, number: int = signal.SIGTERM) -> None:
    """A signal to this process once the file says so."""

    def watch() -> None:
        while not (path.exists() and text in path.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


def test_a_save_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    signal_me_when(tmp_path / "logs" / "events.jsonl", "ready")
    worker = """
        signal.signal(signal.SIGTERM, lambda *_: time.sleep(600))
        events.write("ready")
        time.sleep(600)
    """
    began = time.monotonic()
    ended = run(tmp_path, worker, StopRequest(grace_s=0.5))
    assert time.monotonic() - began < 10
    assert (ended.status, ended.exit_status) == ("failed", 1)
    assert ended.message == "the workers did not finish saving in time"
    assert psutil.Process().children() == []


def test_before_the_workers_are_ready_a_signal_ends_all_at_once(tmp_path: Path) -> None:
    signal_me_when(tmp_path / "logs" / "events.jsonl", "importing")
    ended = run(tmp_path, 'events.write("phase", text="importing"); time.sleep(600)', StopRequest())
    assert (ended.status, ended.exit_status) == ("stopped", 143)
    assert ended.message == "stopped before the first step: SIGTERM from outside"
    assert psutil.Process().children() == []


SAVES = """
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    events.write("ready")
    while not asked:
        time.sleep(0.05)
    (run_dir / "result.json").write_text(json.dumps({"status": "stopped"}))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_lets_the_workers_save(tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    before = signal.signal(number, lambda *_: None)  # what would come of it without the request
    signal_me_when(tmp_path / "logs" / "events.jsonl", "ready", number)
    ended = run(tmp_path, SAVES, StopRequest(leave_at=time.time() + 20, leave_grace_s=60))
    signal.signal(number, before)
    assert (ended.status, ended.exit_status) == ("stopped", 143)
    assert ended.message == f"stopped and saved: {name} from outside"


def test_nohup_is_kept() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.wanted()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_does_not_end_it(capfd: pytest.CaptureFixture[str]) -> None:
    main, terminal = os.openpty()
    kept = os.dup(1)
    os.dup2(terminal, 1)
    os.close(terminal)
    os.close(main)
    try:
        with open(1, "w", closefd=False) as screen, contextlib.redirect_stdout(screen):
            attempt.say("step=1")
            attempt.say("step=2")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    attempt.say("said again")
    assert capfd.readouterr().out == "said again\n"


def test_the_workers_save_before_the_capacity_ends(tmp_path: Path) -> None:
    leave_at = time.time() + 2
    ended = run(tmp_path, SAVES, StopRequest(leave_at=leave_at, leave_grace_s=60))
    assert leave_at < time.time() < leave_at + 10
    assert (ended.status, ended.exit_status) == ("stopped", 143)
    assert ended.message == "stopped and saved: the capacity that the job runs in ends soon"


@pytest.mark.parametrize(
    ("error", "kind", "exit_status"),
    [
        ({"type": "OutOfMemoryError", "message": "CUDA out of memory"}, "out of memory", 1),
        ({"type": "FloatingPointError", "message": "step 3: the loss"}, "not finite", 1),
        ({"type": "MachineError", "message": "no card", "exit_status": 3}, "refused", 3),
        ({"type": "DistBackendError", "message": "NCCL error: remote"}, "crash", 1),
    ],
)
def test_a_failure_is_judged_by_what_the_worker_wrote(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: dict[str, object],
    kind: str,
    exit_status: int,
) -> None:
    error = {"rank": 0, "time": 5.0, "traceback": "Traceback: here", **error}
    worker = f"""
        events.write("step", step=7, loss=2.5)
        (run_dir / "logs" / "error-rank-0.json").write_text({json.dumps(json.dumps(error))})
        sys.exit(1)
    """
    ended = run(tmp_path, worker, StopRequest())
    assert (ended.status, ended.kind, ended.exit_status) == ("failed", kind, exit_status)
    assert (ended.rank, ended.time, ended.step) == (0, 5.0, 7)
    log = capsys.readouterr().out
    assert "step=7 loss=2.5\n" in log
    assert "rank 0:\nTraceback: here" in log


def test_steps_are_told_once_a_second_and_the_last_one_always(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = attempt.Narrator(tmp_path / "events.jsonl", aloud=True)
    events = EventLog(tmp_path / "events.jsonl")
    for step in range(1, 101):
        events.write("step", step=step, loss=1.0, train_steps=200)
    events.write("checkpoint", step=100, path="/x", seconds=2.0)
    events.write("step", step=101, loss=1.0, train_steps=200)
    told.new()
    told.flush()
    assert capsys.readouterr().out.splitlines() == [
        "step=1 loss=1",
        "step=100 loss=1",  # before what came after it
        "step 100: saved /x in 2.0 s",
        "step=101 loss=1",
    ]
    assert (told.step, told.ready, told.checkpoint) == (101, True, "/x")
