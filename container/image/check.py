"""Does an image hold what a job needs? `python container/image/check.py`, run in it; no GPU needed.

One line a part; exit status 1 if one is missing or of another version.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from container import network

IMPORTS = ("torch", "pydantic", "yaml", "tensorboard")
# Transformer Engine's libraries need the driver, which a build has not.
WITH_GPU = ("transformer_engine.pytorch", "megatron.core", "megatron.training")


def packages() -> Iterator[tuple[str, str | None]]:
    """(part, what is wrong) of each dependency of the project."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.version import Version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["te"]]:
        requirement = Requirement(text)
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield text, "missing"
            continue
        fits = requirement.specifier.contains(Version(found).base_version)
        yield f"{requirement.name} {found}", None if fits else f"{requirement} is needed"


def efa(root: Path = Path("/")) -> Iterator[tuple[str, str | None]]:
    problems = network.settings(
        "ml.p6-b200.48xlarge", None, nodes=2, environ={}, root=root
    ).problems
    yield "NCCL plug-in for EFA", problems[0] if problems else None
    tool = shutil.which("fi_info") or root / "opt/amazon/efa/bin/fi_info"
    yield "fi_info", None if Path(tool).exists() else "missing"


def imports() -> Iterator[tuple[str, str | None]]:
    names = [*IMPORTS]
    if Path("/proc/driver/nvidia/version").exists():
        names += WITH_GPU
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            yield f"import {name}", f"{type(error).__name__}: {error}"
        else:
            yield f"import {name}", None


def main(parts: tuple[Callable[[], Iterator[tuple[str, str | None]]], ...]) -> int:
    failed = False
    for check in parts:
        for part, wrong in check():
            print(f"{'FAIL' if wrong else 'ok':<4}  {part}" + (f": {wrong}" if wrong else ""))
            failed |= wrong is not None
    return int(failed)


if __name__ == "__main__":
    sys.exit(main((packages, efa, imports)))
