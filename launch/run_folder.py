"""The folder of a run: its name, what is in it, and how a second start finds it."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from planning.findings import Finding, MachineError
from training.checkpoints import (
    TRACKER,
    CheckpointState,
    Newest,
    checkpoints,
    newest_complete,
    prepare_resume,
    prune,
)
from training.run_files import (
    begin,
    continue_metrics,
    move_into,
    said_of,
    write_environment,
    write_plan,
)

__all__ = [
    "CheckpointState",
    "Newest",
    "begin",
    "checkpoints",
    "continue_metrics",
    "default_run_dir",
    "free_space_check",
    "has_run",
    "is_only_planned",
    "is_started",
    "lock",
    "newest_complete",
    "planned_config",
    "prepare_resume",
    "prune",
    "said_of",
    "set_aside",
    "write_environment",
    "write_plan",
    "write_private",
]

# All that a run writes; nothing else in the folder is ever touched.
CONTENTS = (
    "plan.yaml",
    "plan.json",
    "report.txt",
    "request.json",
    "start.json",
    "job.json",
    "job.sbatch",
    "job.yaml",
    "docker.sh",
    "container",
    "metrics.jsonl",
    "result.json",
    "loss.png",
    "tensorboard",
    "checkpoints",
    "logs",
)
# Those of them that a plan alone has not.
BEGUN = ("metrics.jsonl", "job.json", "start.json", "job.sbatch", "job.yaml", "docker.sh")
LOCK = ".lock"


def default_run_dir(model_name: str, root: Path = Path("runs")) -> Path:
    """Make and return `root/<model name>/<YYYYmmdd-HHMMSS>`; runs of one second get -2, -3, ..."""
    start = time.strftime("%Y%m%d-%H%M%S")
    count = 1
    while True:
        path = root / model_name / (start if count == 1 else f"{start}-{count}")
        with said_of("run_dir", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()  # only one of two processes succeeds
                return path
            except FileExistsError:
                count += 1


def has_run(run_dir: Path, checkpoint_folder: Path | None = None) -> bool:
    """Has a run been started in this folder, or saved to `checkpoint_folder`?"""
    saved = checkpoint_folder is not None and any(checkpoint_folder.glob("iter_*"))
    if saved or is_started(run_dir):
        return True
    return (run_dir / "plan.yaml").exists() and not is_only_planned(planned_config(run_dir))


def is_started(run_dir: Path) -> bool:
    """Whether a folder holds more than a plan: a run, or files that start one elsewhere."""
    return any((run_dir / name).exists() for name in BEGUN)


def planned_config(folder: Path) -> dict[str, Any] | None:
    """The configuration in the folder's plan.yaml; None if there is none that can be read."""
    try:
        found = dict(yaml.safe_load((folder / "plan.yaml").read_text())["config"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return found if found.keys() >= {"model", "data", "training"} else None


def is_only_planned(config: Mapping[str, Any] | None) -> bool:
    """Whether the configuration is of launch=plan: no run has started with it."""
    launch = config.get("launch") if config else None
    return isinstance(launch, Mapping) and launch.get("kind") == "plan"


def set_aside(run_dir: Path, checkpoint_folder: Path | None = None) -> Path | None:
    """Move an earlier run to run_dir/previous-<time>/, for a new start there; None if no run.

    `checkpoint_folder`, where it lies elsewhere, gets its own previous-<time>/: older
    checkpoints of higher steps would be taken for the new run's newest. It is returned where
    run_dir itself held nothing.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    moved = move_into(run_dir / f"previous-{stamp}", [run_dir / name for name in CONTENTS])
    inside = run_dir / "checkpoints"
    if checkpoint_folder and checkpoint_folder.resolve() != inside.resolve():
        found = [*checkpoint_folder.glob("iter_*")]
        found += [checkpoint_folder / name for name in (TRACKER, "plan.yaml")]
        moved_too = move_into(checkpoint_folder / f"previous-{stamp}", found)
        return moved or moved_too
    return moved


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read (account details), whole or not at all.

    Its folder becomes the owner's alone if it has to be made.
    """
    with said_of("run_dir", path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        beside.replace(path)


@contextmanager
def lock(
    run_dir: Path, name: str = LOCK, doing: str = "trains in", wait: bool = False
) -> Iterator[None]:
    """Hold the folder for this process; MachineError if another one does the same in it. wait:
    until that one is ready, instead.

    The kernel lets go when the process ends, however it ends.
    """
    with said_of("run_dir", run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        held = os.open(run_dir / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise MachineError(
                Finding(
                    id="run_folder_in_use",
                    severity="error",
                    setting="run_dir",
                    message=f"another process {doing} {run_dir} now",
                    fix="stop it first, or choose another run_dir",
                )
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(held)


def free_space_check(path: Path, bytes_needed: int, setting: str = "checkpoint.save") -> None:
    """MachineError if the file system of `path` (which may not exist yet) has less space free."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < bytes_needed:
        raise MachineError(
            Finding(
                id="disk_space",
                severity="error",
                setting=setting,
                message=f"{path} needs {_gib(bytes_needed)} of disk, {_gib(free)} are free there",
                fix="free some space, choose a folder on a larger disk, lower checkpoint.keep, "
                "or set checkpoint.save=false",
            )
        )


def _gib(size: int) -> str:
    if size < 2**30 / 10:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 2**30:,.1f} GiB"
