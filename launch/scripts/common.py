"""What scripts and manifests share: files beside the plan, mounts, quoting."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from container.contract import BASE, HOST, HOSTS
from launch.checks import is_local, named_paths
from planning.schema import RunConfig

__all__ = ["BASE", "HOST", "HOSTS", "IMAGE_ROOT", "OPT_ML", "PLAN", "Mount", "exports", "mounts",
           "sh"]  # fmt: skip
# Of the repository in the image, whose interpreter is `python`: container/Dockerfile.
IMAGE_ROOT = "/opt/slipway"
OPT_ML = "container"  # in the run folder: what stands for /opt/ml
PLAN = "input/data/plan"  # in it: plan.yaml and start.json


@dataclass(frozen=True)
class Mount:
    """A folder that a container sees under the same path."""

    path: Path
    writable: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.path}" + ("" if self.writable else ":ro")


def mounts(config: RunConfig, run_dir: Path, cache: Path) -> list[Mount]:
    """Folders of the run: its own, the cache, its data, its checkpoints if they lie elsewhere."""
    writable = {run_dir, cache}
    read = set()
    for setting, text in named_paths(config):
        if not is_local(text):
            continue
        if setting == "checkpoint.save":
            writable.add(Path(text))
        elif setting == "checkpoint.load":
            read.add(Path(text))
        else:  # a prefix of files
            read.add(Path(text).parent)

    def inside(path: Path, folders: Iterable[Path]) -> bool:
        return any(folder in path.parents for folder in folders)

    every = writable | read
    found = [Mount(path, True) for path in writable if not inside(path, writable)]
    found += [Mount(p, False) for p in read - writable if not inside(p, every)]
    return sorted(found, key=lambda mount: (not mount.writable, mount.path))


def exports(values: Mapping[str, str]) -> list[str]:
    """Lines of a shell."""
    return [f"export {name}={sh(value)}" for name, value in values.items()]


def sh(text: object) -> str:
    """A word of a shell's command line."""
    return shlex.quote(str(text))
