"""A process that ends when its parent ends, however that one ends; and none that outlives a
block of code (Linux). Standard library only.

`python -m training.orphans PID COMMAND...` becomes COMMAND, which is killed when PID, which must
be its parent, ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LAUNCHER_PID = "SLIPWAY_LAUNCHER_PID"  # set by whoever starts torchrun: its own process id
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def kill_me_with(parent: int) -> None:
    """Have the kernel send this process SIGKILL when `parent`, its parent, ends.

    The kernel watches the parent's *thread* that forked, so that thread must live as long as the
    process: fork from the main thread. The setting outlives exec, and a fork does not inherit it.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_parent() -> None:
    """For a worker, before its long imports: die with torchrun, and let own forks die with us.

    Forks are those of data loaders, whose own watch on their parent takes 5 s and more. Only
    forks from the main thread are bound, as another thread may end long before its children.
    """
    parent = os.getppid()
    kill_me_with(parent)
    launcher = os.environ.get(LAUNCHER_PID)
    # torchrun may have ended before we looked, and `parent` be the process that adopted us.
    if launcher and _libc is not None and _parent_of(parent) != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)

    forking = {"parent": 0}

    def before() -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        forking["parent"] = os.getpid() if in_main_thread else 0

    def after_in_child() -> None:
        if forking["parent"]:
            kill_me_with(forking["parent"])

    os.register_at_fork(before=before, after_in_child=after_in_child)


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`, those included that ended and were not waited for."""
    found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [child for child in found if _parent_of(child) == pid]


def terminate_children(pid: int) -> None:
    """Send SIGTERM to the children of `pid`: of torchrun's, the workers."""
    for child in children(pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)


@contextmanager
def descendants_end_here() -> Iterator[None]:
    """Whatever starts inside has ended when this is left: killed, if it has not by itself.

    As the subreaper this process adopts descendants whose parent ended, so none gets lost: those
    of a killed child are found in the next round.
    """
    me = os.getpid()
    others = set(children(me))
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        ended: list[int] = []
        while own := [child for child in children(me) if child not in others]:
            if own == ended:  # they hang in the kernel
                break
            for child in own:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            _wait_for(own, seconds=10)
            ended = own
        if _libc is not None:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _wait_for(killed: list[int], seconds: float) -> None:
    """Wait for children; one that hangs in the kernel (a lost disk) does not hold us for ever."""
    deadline = time.monotonic() + seconds
    for child in killed:
        try:
            while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.01)
        except ChildProcessError:  # waited for elsewhere
            pass


def _parent_of(pid: int) -> int:
    """Parent of a process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


if __name__ == "__main__":
    kill_me_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # the setting outlives it
