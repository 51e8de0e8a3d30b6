"""Real launchers, torchruns and workers; only the training in the workers is a stand-in."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import local
from launch.run_folder import lock
from planning.findings import ChoiceError, MachineError
from training import torchrun

HERE = Path(__file__).parent
PATIENCE = 60  # seconds; torchrun starts in about 4


class Launcher:
    """A launcher process of its own, its screen kept in a file."""

    def __init__(self, run_dir: Path, processes: int = 2, port: int = 0, **fake: Any) -> None:
        self.run_dir = run_dir
        self.screen = run_dir.parent / f"{run_dir.name}-screen.txt"
        with open(self.screen, "wb") as screen:
            self.process = start(run_dir, processes, port, screen.fileno(), **fake)

    def text(self) -> str:
        return self.screen.read_text()

    def wait_for(self, words: str) -> None:
        until(lambda: words in self.text(), f"{words!r} on the screen")

    def ends_with(self) -> int:
        return self.process.wait(PATIENCE)

    def result(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "result.json").read_text())

    def left(self) -> list[psutil.Process]:
        """Processes of the run: torchrun, workers and their forks name its folder."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if str(self.run_dir) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found


def start(
    run_dir: Path, processes: int, port: int, screen: int, **fake: Any
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, HERE / "start_fake.py", run_dir, str(processes), str(port)],
        cwd=run_dir.parent,
        env=os.environ
        | {"PYTHONPATH": str(torchrun.ROOT), "FAKE": json.dumps(fake), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=screen,
        stderr=screen,
    )


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path / "run") in (process.info["cmdline"] or []):
            process.kill()


def test_a_terminal_shows_one_line_that_updates_in_place(run_dir: Path) -> None:
    ours, theirs = pty.openpty()
    columns = 70
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    launcher = start(run_dir, 1, 0, theirs, step_s=0.15)
    os.close(theirs)
    screen = b""
    try:
        while chunk := os.read(ours, 65536):
            screen += chunk
    except OSError:  # EIO: the launcher has closed the terminal
        pass
    assert launcher.wait(PATIENCE) == 0
    rows = screen.decode().split("\r\n")
    progress = next(row for row in rows if "step 20/20" in row)
    redrawn = re.split(r"\r\x1b\[K", progress)
    assert len(redrawn) > 3  # several steps on one row
    assert all(len(text) < columns for text in redrawn)  # so that nothing scrolls
    assert any("s left" in text for row in rows for text in row.split("\r"))
    assert any(row.endswith("step 10: validation loss 1.2500") for row in rows)
    assert rows[-2] == "outcome: done: "


def test_a_first_signal_lets_the_workers_finish_and_save(run_dir: Path) -> None:
    launcher = Launcher(run_dir, steps=10000, save_s=1.5)
    launcher.wait_for("step 10/10000")
    launcher.process.send_signal(signal.SIGTERM)
    launcher.process.send_signal(signal.SIGTERM)  # at once: a supervisor's repetition
    assert launcher.ends_with() == 143
    assert launcher.left() == []
    result = launcher.result()
    assert result["status"] == "stopped"
    assert 10 <= result["steps"] < 10000
    text = launcher.text()
    assert "finishing the step and saving; press Ctrl-C again to stop at once" in text
    assert "\x1b" not in text  # no terminal: plain lines, each tenth step and the last
    shown = [int(step) for step in re.findall(r"^step (\d+)/10000", text, re.MULTILINE)]
    assert shown[:2] == [1, 10]
    assert shown[-1] == result["steps"]
    assert all(step % 10 == 0 for step in shown[1:-1])


def test_a_second_signal_stops_at_once(run_dir: Path) -> None:
    launcher = Launcher(run_dir, steps=10000, save_s=600)
    launcher.wait_for("step 10/10000")
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for("finishing the step")
    time.sleep(0.7)  # later than a repetition
    sent = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.ends_with() == 143
    assert time.monotonic() - sent < 5
    assert launcher.left() == []
    assert launcher.result()["status"] == "stopped"
    assert launcher.result()["steps"] >= 10  # what was told before


def test_a_signal_before_the_workers_are_up_stops_at_once(run_dir: Path) -> None:
    launcher = Launcher(run_dir, import_s=600)
    launcher.wait_for("importing Megatron")
    sent = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.ends_with() == 143
    assert time.monotonic() - sent < 5
    assert launcher.left() == []
    assert "outcome: stopped: stopped at once, without saving" in launcher.text()


def test_killing_the_launcher_leaves_no_process(run_dir: Path) -> None:
    launcher = Launcher(run_dir, steps=10000)
    launcher.wait_for("step 10/10000")
    assert len(launcher.left()) == 6  # launcher, torchrun, 2 workers, a loader of each
    launcher.process.kill()
    launcher.process.wait()
    until(lambda: not launcher.left(), "end of the run's processes", seconds=5)


def test_killing_torchrun_ends_its_workers_and_is_said(run_dir: Path) -> None:
    # A module of the same name where the command is called is not taken for ours.
    (run_dir.parent / "fake_worker.py").write_text("raise SystemExit('not ours')")
    launcher = Launcher(run_dir, steps=10000)
    launcher.wait_for("step 10/10000")
    (torchrun,) = psutil.Process(launcher.process.pid).children()
    torchrun.kill()
    assert launcher.ends_with() == 1
    assert launcher.left() == []
    assert "torchrun was killed by signal 9" in launcher.text()


def test_a_crash_names_the_rank_that_failed_first(run_dir: Path) -> None:
    launcher = Launcher(run_dir, steps=10000, crash_rank=1, crash="error")
    assert launcher.ends_with() == 1
    assert launcher.left() == []
    text = launcher.text()
    assert "rank 1 failed: RuntimeError: out of luck" in text
    assert f"log: {run_dir}/logs/rank-1.log" in text
    assert "Traceback" not in text
    assert launcher.result()["status"] == "failed"


def test_a_killed_worker_is_said_to_be_killed(run_dir: Path) -> None:
    launcher = Launcher(run_dir, steps=10000, crash_rank=1, crash=int(signal.SIGKILL))
    assert launcher.ends_with() == 1
    assert launcher.left() == []
    assert "rank 1 was killed by signal 9: often the machine ran out of memory" in launcher.text()


def test_a_taken_port_is_refused_before_anything_starts(run_dir: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        launcher = Launcher(run_dir, port=port)
        assert launcher.ends_with() == 3
    assert launcher.text().startswith(f"launch.port: port {port} cannot be used: Address already")
    assert not run_dir.exists()


def test_a_port_just_given_back_is_free() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    local.check_port(port)
    with pytest.raises(ChoiceError, match="70000 is not a port"):
        local.check_port(70000)


TORCHRUN_FAILURE = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : {code} (pid: 13582)
  error_file: <N/A>
"""


def error_file(logs: Path, rank: int, time: float, **fields: Any) -> None:
    error = {"rank": rank, "type": "RuntimeError", "message": f"of rank {rank}", "time": time}
    (logs / f"error-rank-{rank}.json").write_text(json.dumps(error | fields))


FOREIGN = """of ranks [0]
Traceback (most recent call last): (RANK 0)
  File "a.py", line 1, in plan
    raise KeyError(
KeyError: 'x not in state'
"""


@pytest.mark.parametrize(
    ("death", "errors", "message", "exit_status"),
    [
        # Another rank's lost connection is a consequence of the kill, though it has a trace.
        (-9, [(0, 5.0, {})], "rank 2 was killed by signal 9: often the machine", 1),
        # An abort or torchrun's SIGTERM follow from another rank's error.
        (-6, [(0, 5.0, {}), (1, 4.0, {})], "rank 1 failed: RuntimeError: of rank 1", 1),
        (-15, [], "rank 2 was killed by signal 15; it last said: bye", 1),
        (7, [], "rank 2 ended with exit status 7; it last said: bye", 1),
        # The worker found that this machine, or any, cannot run the choice.
        (3, [(2, 1.0, {"exit_status": 3})], "of rank 2", 3),
        (2, [(2, 1.0, {"exit_status": 2})], "of rank 2", 2),
        # torch's CheckpointException holds the traces of all ranks: their error alone is shown.
        (
            1,
            [(0, 1.0, {"type": "CheckpointException", "message": FOREIGN})],
            "rank 0 failed: CheckpointException: of ranks [0]: KeyError: 'x not in state'\n",
            1,
        ),
    ],
)
def test_the_cause_of_a_failure(
    tmp_path: Path,
    death: int,
    errors: list[tuple[int, float, dict[str, Any]]],
    message: str,
    exit_status: int,
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-2.log").write_text("hello\nbye\n\n")
    for rank, when, fields in errors:
        error_file(logs, rank, when, **fields)
    outcome = local._judge(tmp_path, 1, TORCHRUN_FAILURE.format(code=death))
    assert outcome.message.startswith(message)
    assert (outcome.status, outcome.exit_status) == ("failed", exit_status)


def test_a_result_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """On a full disk, or in a folder that is gone."""
    failed = local.Outcome("failed", 1, "rank 0 failed", {})
    ended = local._with_result(failed, tmp_path / "gone", {"steps": 2})
    said = f"rank 0 failed\ncannot write to {tmp_path}/gone/result.json: No such file or directory"
    assert (ended.exit_status, ended.message) == (1, said)
    assert ended.result["steps"] == 2


def test_processes_that_end_well_without_a_result_have_failed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    outcome = local._judge(tmp_path, 0, "")
    assert (outcome.status, outcome.exit_status) == ("failed", 1)
    assert "without a result" in outcome.message


def test_a_folder_that_two_runs_want_is_refused_to_the_second(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(MachineError, match="another process trains"):
        lock(tmp_path).__enter__()
    with lock(tmp_path):  # free again
        pass
