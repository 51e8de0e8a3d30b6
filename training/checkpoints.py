"""Which checkpoints of a folder are complete, which one to resume from, which to delete.

Needs neither torch nor Megatron, so that a launcher knows within a second. What is written, in
order (megatron-core 0.19.2, megatron/training/checkpointing.py `save_checkpoint`):

  torch_dist    iter_N/__<rank>_<k>.distcp by all ranks, then rank 0: iter_N/.metadata,
                iter_N/metadata.json (dist_checkpointing/serialization.py `save`), the tracker
  torch_dcp and iter_N/__<rank>_<k>.distcp by all ranks, then rank 0: iter_N/.metadata (written
  fsdp_dtensor  beside and renamed: torch/distributed/checkpoint/filesystem.py), the tracker

`.metadata` is a pickle that names each stored piece's file, offset and length: files that are
missing or cut are found by it. The tracker, latest_checkpointed_iteration.txt, is rewritten in
place, so after a kill it can be empty or old; it is never trusted here, only set.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

TRACKER = "latest_checkpointed_iteration.txt"
# In an iteration's folder, where nodes share none: every rank has saved it.
SAVED = ".saved"
_FOLDER = re.compile(r"iter_(\d{7,})")
_DELETING = ".deleting"
_BROKEN = ".broken"


@dataclass(frozen=True)
class CheckpointState:
    """One iteration's folder. `reason` says what is wrong where it is not complete."""

    step: int
    path: Path
    complete: bool
    reason: str
    # "dcp" is torch.distributed.checkpoint's own, under both torch_dcp and fsdp_dtensor.
    format: Literal["torch_dist", "dcp", "unknown"]
    size: int  # bytes named by .metadata; 0 where it is not readable


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint, if any, and the newer ones that are not complete."""

    taken: CheckpointState | None
    passed_over: list[CheckpointState]

    def __str__(self) -> str:
        lines = [f"passed over {broken.path.name}: {broken.reason}" for broken in self.passed_over]
        if self.taken:
            lines.append(f"resuming from {self.taken.path.name}")
        elif lines:
            lines.append("no complete checkpoint: starting from the first step")
        return "\n".join(lines)


class _Stub:
    """Stands for any class named in .metadata: keeps its state, runs none of its code."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _StubUnpickler(pickle.Unpickler):
    """Reads a pickle without importing or calling anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (_Stub,), {})


def inspect(path: Path) -> CheckpointState:
    """Is the iteration folder `path` a whole checkpoint? Compares sizes, reads no tensors."""
    match = _FOLDER.fullmatch(path.name)
    step = int(match.group(1)) if match else -1

    def broken(reason: str, format: Any = "unknown", size: int = 0) -> CheckpointState:
        return CheckpointState(step, path, False, reason, format, size)

    metadata_path = path / ".metadata"
    if not metadata_path.exists():
        if any(path.glob("mp_rank_*")):
            return broken("it is in Megatron's legacy torch format, which is not read here")
        return broken("the save was cut off before .metadata was written")
    try:
        with open(metadata_path, "rb") as file:
            stored = _StubUnpickler(file).load().storage_data
        ends: dict[str, int] = {}
        for piece in stored.values():
            end = piece.offset + piece.length
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), end)
        is_torch_dist = any(index.fqn.startswith("common_state/") for index in stored)
    except OSError as error:
        return broken(f".metadata cannot be read: {error.strerror}")
    except Exception:  # a cut pickle raises nearly anything
        return broken(".metadata is cut short or damaged")
    kind = "torch_dist" if is_torch_dist else "dcp"
    size = sum(ends.values())
    for name, end in sorted(ends.items()):
        try:
            found = (path / name).stat().st_size
        except OSError:
            return broken(f"its file {name} is missing", kind, size)
        if found < end:
            return broken(f"its file {name} has {found} of {end} bytes", kind, size)
    if is_torch_dist and not _is_json(path / "metadata.json"):
        return broken("the save was cut off before metadata.json was written", kind, size)
    return CheckpointState(step, path, True, "", kind, size)  # type: ignore[arg-type]


def checkpoints(folder: Path) -> list[CheckpointState]:
    """All iteration folders of `folder`, oldest first; none if the folder does not exist."""
    return [inspect(path) for path in _iteration_folders(folder)]


def newest_complete(folder: Path, at_most: int | None = None) -> Newest:
    """The newest complete checkpoint, and why newer ones were passed over.

    at_most: steps beyond it are passed over.
    """
    passed_over: list[CheckpointState] = []
    for path in reversed(_iteration_folders(folder)):
        state = inspect(path)
        if state.complete and at_most is not None and state.step > at_most:
            state = replace(state, complete=False, reason="another node does not have it whole")
        if state.complete:
            return Newest(state, passed_over)
        passed_over.append(state)
    return Newest(None, passed_over)


def prepare_resume(folder: Path, at_most: int | None = None) -> Newest:
    """Make Megatron's load from `folder` take the newest complete checkpoint.

    at_most: the newest step that counts, where other nodes have copies of their own.
    Broken newer folders are renamed to iter_N.broken, so that a later save of that step does not
    mix with their files; nothing is deleted. Without a complete one the tracker goes, and
    Megatron starts from the first step.
    """
    newest = newest_complete(folder, at_most)
    for broken in newest.passed_over:
        broken.path.rename(_free_name(broken.path.with_name(broken.path.name + _BROKEN)))
    tracker = folder / TRACKER
    if newest.taken:
        _write_atomically(tracker, str(newest.taken.step))
    else:
        tracker.unlink(missing_ok=True)
    return newest


def prune(folder: Path, keep: int) -> list[Path]:
    """Delete complete checkpoints older than the newest `keep` complete ones; returns them.

    A folder is renamed before its files go, so that a kill leaves no half-deleted iteration;
    what an earlier kill left is deleted now. Incomplete folders, and the one that the tracker
    names, stay.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest checkpoint stays")
    _delete_leftovers(folder)
    if len(_iteration_folders(folder)) <= keep:
        return []
    complete = [state for state in checkpoints(folder) if state.complete]
    try:
        named = (folder / TRACKER).read_text().strip()
    except OSError:
        named = ""
    return _delete(state.path for state in complete[:-keep] if str(state.step) != named)


def prune_part(folder: Path, keep: int, saved: int) -> list[Path]:
    """As `prune`, on a node whose folder has only what its own ranks wrote; returns the deleted.

    saved: the step that all ranks have just saved. Here no checkpoint can be told whole by its
    files, so each that was saved is marked, and of those the newest `keep` stay; so do folders
    without a mark (saves that were cut off) that are newer than the oldest that stays.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest checkpoint stays")
    _delete_leftovers(folder)
    newest = next((p for p in _iteration_folders(folder) if _step(p) == saved), None)
    if newest is None:  # this node's ranks wrote nothing: replicas of others' parts
        return []
    (newest / SAVED).touch()
    marked = [p for p in _iteration_folders(folder) if (p / SAVED).exists()]
    # A copy of an earlier start is whole.
    marked += [s.path for s in checkpoints(folder) if s.complete and s.path not in marked]
    stay = sorted(marked, key=_step)[-keep:]
    return _delete(p for p in _iteration_folders(folder) if _step(p) < _step(stay[0]))


def _delete_leftovers(folder: Path) -> None:
    for leftover in folder.glob(f"iter_*{_DELETING}"):
        shutil.rmtree(leftover, ignore_errors=True)


def _delete(paths: Iterable[Path]) -> list[Path]:
    deleted = []
    for path in paths:
        doomed = path.rename(path.with_name(path.name + _DELETING))
        shutil.rmtree(doomed, ignore_errors=True)
        deleted.append(path)
    return deleted


def _step(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def _iteration_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def _free_name(path: Path) -> Path:
    candidate, count = path, 1
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate


def _write_atomically(path: Path, text: str) -> None:
    """After a crash at any moment the file holds the old text or the new."""
    beside = path.with_name(path.name + ".new")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
