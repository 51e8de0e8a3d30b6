"""Which failures are tried again, and which one was the first."""

from __future__ import annotations

import pytest

from container.restart import End, decide, first_cause, kind_of_words

CRASH = End("a", "failed", "rank 0 failed", 1, "crash", rank=0, code=1, time=10, step=5)


@pytest.mark.parametrize(
    ("failed_at", "max_restarts", "possible", "again", "why"),
    [
        ([], 3, True, True, "restart 1 of 3"),
        ([2, 4], 3, True, True, "restart 3 of 3"),
        ([1, 2, 4], 3, True, False, "3 restarts are used up"),
        ([], 0, True, False, "max_restarts=0"),
        ([2, 5], 3, True, False, "it failed after step 5 twice"),
        ([], 3, False, False, "the hosts share no run folder"),
    ],
)
def test_a_crash_is_tried_again_while_that_helps(
    failed_at: list[int], max_restarts: int, possible: bool, again: bool, why: str
) -> None:
    found = decide([CRASH], failed_at, max_restarts, possible=possible)
    assert found[0] is again
    assert found[1].startswith(why)


@pytest.mark.parametrize("kind", ["refused", "out of memory", "not finite", "disk full"])
def test_what_would_come_again_is_not_tried(kind: str) -> None:
    end = End("a", "failed", kind=kind, step=5)  # type: ignore[arg-type]
    assert decide([end], [], 3, possible=True)[0] is False


def test_the_first_cause_is_the_killed_process_then_the_earliest_error() -> None:
    lost = End("b", "failed", "connection closed", 1, "crash", rank=8, code=1, time=9)
    killed = End("c", "failed", "killed", 1, "crash", rank=16, code=-9, time=12)
    told = End("d", "failed", "a failed first", 1, "elsewhere")
    assert first_cause([CRASH, lost, told]) is lost
    assert first_cause([told, CRASH, lost, killed]) is killed
    ended = End("c", "failed", "terminated", 1, "crash", rank=16, code=-15, time=12)
    assert first_cause([CRASH, ended]) is CRASH  # SIGTERM follows from another failure


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("OutOfMemoryError CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        ("FloatingPointError step 7: the loss is not finite", "not finite"),
        ("RuntimeError NCCL error: unhandled system error", "crash"),
        # The guess about any SIGKILL is no finding.
        ("rank 2 was killed by signal 9: often the machine ran out of memory (the kernel's log "
         "says so)", "crash"),
    ],
)  # fmt: skip
def test_kinds_by_their_words(words: str, kind: str) -> None:
    assert kind_of_words(words) == kind
