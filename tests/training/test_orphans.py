"""No process outlives a block that says so."""

from __future__ import annotations

import os
import subprocess
import sys

from training.orphans import children, descendants_end_here, terminate_children

# A child whose own child outlives it.
FAMILY = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_descendants_end_with_the_block_and_others_do_not() -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        with descendants_end_here():
            child = subprocess.Popen(["sleep", "600"])
            parent = subprocess.Popen(
                [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True
            )
            assert parent.stdout is not None
            grandchild = int(parent.stdout.readline())
            parent.wait()
            parent.stdout.close()
            assert grandchild in children(os.getpid())  # adopted
        assert not alive(child.pid)
        assert not alive(grandchild)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_children_are_asked_to_stop() -> None:
    code = "import subprocess, sys; sys.exit(subprocess.Popen(['sleep', '600']).wait() + 15)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not children(parent.pid):
        pass
    terminate_children(parent.pid)
    assert parent.wait(10) == 0  # its child ended with -15
