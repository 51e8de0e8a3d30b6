"""What pip is to install into an image: `packages.py REQUIREMENTS CONSTRAINTS` writes two files.

The project's dependencies at the versions of requirements.lock, with which it is tested; what the
image has of PyTorch and CUDA stays as it is, as its NCCL, EFA and drivers fit together. Fails where
the image's PyTorch or Python is not one that the project runs with.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
# Packages that the image brings and that fit together.
IMAGES = re.compile(r"(torch|triton|nvidia-(?!ml-py).*|cuda-.*)")


def pinned(lock: str) -> dict[str, str]:
    """Name -> version of a requirements.lock."""
    found = re.findall(r"^([\w.-]+)(?:\[[\w,.-]+\])?==([\w.+!-]+)", lock, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def plan(
    project: Mapping[str, Any], lock: str, installed: Mapping[str, str]
) -> tuple[list[str], list[str], list[str]]:
    """(requirements, constraints, what is wrong) of an image with `installed` packages.

    project: the table of pyproject.toml.
    """
    wanted = [Requirement(text) for text in project["dependencies"]]
    wrong = []
    for requirement in wanted:
        here = installed.get(canonicalize_name(requirement.name))
        if not IMAGES.fullmatch(requirement.name):
            continue
        # Vendors' builds call themselves 2.11.0a0+...: the release counts.
        if here is None:
            wrong.append(f"the base has no {requirement.name}")
        elif not requirement.specifier.contains(Version(here).base_version):
            wrong.append(f"the base has {requirement.name} {here}; {requirement} is needed")
    requirements = [str(r) for r in wanted if not IMAGES.fullmatch(r.name)]
    requirements += project["optional-dependencies"]["te"]
    constraints = [
        f"{name}=={version}" for name, version in pinned(lock).items() if not IMAGES.fullmatch(name)
    ]
    constraints += [
        f"{name}=={version}" for name, version in installed.items() if IMAGES.fullmatch(name)
    ]
    return requirements, sorted(constraints), wrong


def main(requirements_path: Path, constraints_path: Path) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed: dict[str, str] = {
        canonicalize_name(found.metadata["Name"]): found.version
        for found in metadata.distributions()
    }
    lock = (ROOT / "requirements.lock").read_text()
    requirements, constraints, wrong = plan(project, lock, installed)
    python = Requirement(f"python{project['requires-python']}")
    here = ".".join(map(str, sys.version_info[:3]))
    if not python.specifier.contains(here):
        wrong.append(f"the base has Python {here}; {python.specifier} is needed")
    for line in wrong:
        print(f"{line}: choose another base (tools/image.py build --base)", file=sys.stderr)
    requirements_path.write_text("\n".join(requirements) + "\n")
    constraints_path.write_text("\n".join(constraints) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
