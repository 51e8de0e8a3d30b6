"""The image of training jobs: build it, check it, push it to ECR.

    python tools/image.py build [--hardware p6_b200] [--base IMAGE] [--efa VERSION]
    python tools/image.py check
    python tools/image.py push [--region REGION] [--repository NAME]

Each takes --dry-run, which prints the commands and runs nothing. The tag is of what is in the image
(the repository's files, the base, the architecture), so that a tag never means two images. Docker,
Finch and Podman will do. Exit status: 0; 1 if a command failed; 2 for a wrong choice; 3 where this
machine lacks what it takes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from launch.train import report
from planning.findings import ChoiceError, Finding, MachineError, Refusal, did_you_mean
from planning.hardware import INSTANCES

ENGINES = ("docker", "finch", "podman")
DOCKERFILE = ROOT / "container" / "Dockerfile"
PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
# What container/Dockerfile copies.
CONTENT = (
    "pyproject.toml", "requirements.lock", "conf", "container", "launch", "models", "planning",
    "tools", "training",
)  # fmt: skip
NOT_CONTENT = re.compile(r"(^|/)(__pycache__|\.[^/]*|local)(/|$)|\.pyc$")


class CommandFailed(Exception):
    """A command of the engine ended with an error, which it has printed."""


@dataclass(frozen=True)
class Engine:
    """A container engine; with dry_run its commands are printed and not run."""

    name: str
    dry_run: bool

    def __call__(self, *words: str, stdin: str | None = None) -> None:
        """Show the command and run it."""
        print(shlex.join([self.name, *words]), flush=True)
        if self.dry_run:
            return
        done = subprocess.run([self.name, *words], input=stdin, text=True, cwd=ROOT)
        if done.returncode:
            raise CommandFailed(f"{self.name} {words[0]} failed with status {done.returncode}")

    def ask(self, *words: str) -> str:
        """What a command that changes nothing prints; "" if it fails, or in a dry run."""
        if self.dry_run:
            return ""
        done = subprocess.run([self.name, *words], capture_output=True, text=True, cwd=ROOT)
        return done.stdout.strip() if done.returncode == 0 else ""


def find_engine(dry_run: bool) -> Engine:
    """The first engine here that answers. Raises MachineError where none does."""
    installed = [name for name in ENGINES if shutil.which(name)]
    for name in installed:
        asked = subprocess.run([name, "info"], capture_output=True, text=True)
        if dry_run or asked.returncode == 0:
            return Engine(name, dry_run)
    if dry_run:
        return Engine(ENGINES[0], dry_run)
    message = (
        f"{', '.join(installed)} is installed and its service does not answer"
        if installed
        else f"no container engine is here ({', '.join(ENGINES)})"
    )
    fix = (
        "start it (systemctl start docker, finch vm start, podman machine start)"
        if installed
        else "install one, or build on a machine that has one: EC2, CodeBuild, your CI"
    )
    raise MachineError(Finding("engine", "error", "", message, fix, machine=True))


def default_base() -> str:
    found = re.search(r"^ARG BASE=(\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def architecture(hardware: str) -> str:
    """Of the hosts of a hardware choice such as p6_b200. Raises ChoiceError."""
    names = {instance.choice: instance for instance in INSTANCES.values()}
    if hardware not in names:
        raise ChoiceError(
            Finding(
                "hardware",
                "error",
                "--hardware",
                f"{hardware} is not an instance type{did_you_mean(hardware, names)}",
                f"take {', '.join(names)}",
            )
        )
    return names[hardware].architecture


def tag(base: str, efa: str, machine: str) -> str:
    """Of the content: two builds of one tag hold the same."""
    digest = hashlib.sha256()
    for part in CONTENT:
        top = ROOT / part
        for path in sorted([top] if top.is_file() else top.rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and not NOT_CONTENT.search(name):
                digest.update(f"{name}\0{path.stat().st_mode & 0o100}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    digest.update(f"{base}\0{efa}\0{machine}".encode())
    return f"{digest.hexdigest()[:16]}-{machine.replace('_', '-')}"


def with_digest(engine: Engine, base: str, platform: str) -> str:
    """The base by the digest that its tag has now, so that a later build gets the same one."""
    if "@sha256:" in base:
        return base
    engine("pull", "--platform", platform, base)
    digests = engine.ask("image", "inspect", "--format", "{{json .RepoDigests}}", base)
    found = json.loads(digests) if digests else []
    return str(found[0]) if found else base


def build(options: argparse.Namespace) -> str:
    """Build the image; returns its name."""
    machine = architecture(options.hardware)
    engine = find_engine(options.dry_run)
    platform = PLATFORMS[machine]
    name = f"{options.repository}:{tag(options.base, options.efa, machine)}"
    if engine.ask("image", "inspect", name):
        print(f"{name} is built already")
        return name
    base = with_digest(engine, options.base, platform)
    words = [
        *("build", "--platform", platform, "--file", "container/Dockerfile"),
        *("--build-arg", f"BASE={base}", "--build-arg", f"EFA_VERSION={options.efa}"),
        *("--label", f"slipway.base={base}", "--tag", name),
    ]
    # SageMaker takes an image, not a list of images with attestations.
    words += {"docker": ["--provenance=false"], "podman": ["--format", "docker"]}.get(
        engine.name, []
    )
    engine(*words, ".")
    return name


def check(options: argparse.Namespace) -> str:
    """Read the Dockerfile, and look into the image that was built of this content."""
    machine = architecture(options.hardware)
    _lint(options.dry_run)
    engine = find_engine(options.dry_run)
    name = f"{options.repository}:{tag(options.base, options.efa, machine)}"
    if not options.dry_run:
        has = engine.ask("image", "inspect", "--format", "{{.Architecture}}", name)
        if not has:
            fix = "python tools/image.py build"
            raise MachineError(Finding("not-built", "error", "", f"{name} is not here", fix))
        if has != PLATFORMS[machine].partition("/")[2]:
            raise ChoiceError(
                Finding("architecture", "error", "--hardware", f"{name} is for {has}",
                        f"build it with --hardware {options.hardware}")
            )  # fmt: skip
    engine("run", "--rm", "--entrypoint", "python", name, "container/image/check.py")
    return name


def _lint(dry_run: bool) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    tool = str(hadolint) if hadolint.exists() else shutil.which("hadolint")
    if tool is None:
        print("warning: hadolint is not installed, so the Dockerfile is not read (make setup)")
        return
    print(f"hadolint {DOCKERFILE.relative_to(ROOT)}", flush=True)
    if not dry_run and subprocess.run([tool, str(DOCKERFILE)]).returncode:
        raise CommandFailed("hadolint finds fault with the Dockerfile")


def push(options: argparse.Namespace) -> str:
    """Build the image if need be and push it; returns its URI in ECR."""
    local = build(options)
    engine = find_engine(options.dry_run)
    version = local.rpartition(":")[2]
    if options.dry_run:
        account, region = "ACCOUNT", options.region or "REGION"
        registry = f"{account}.dkr.ecr.{region}.amazonaws.com"
        print(f"ecr create-repository {options.repository}, unless it exists")
        login = "the token of ecr get-authorization-token"
    else:
        from launch.aws.clients import Clients, said

        clients = Clients(options.region)
        registry = f"{clients.identity[0]}.dkr.ecr.{clients.region}.{_domain(clients.region)}"
        ecr = clients("ecr")
        _repository(ecr, options.repository)
        if _pushed(ecr, options.repository, version):
            uri = f"{registry}/{options.repository}:{version}"
            print(f"{uri} is pushed already")
            return uri
        with said("get a token for ECR"):
            token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
        login = base64.b64decode(token).decode().partition(":")[2]
    uri = f"{registry}/{options.repository}:{version}"
    engine("login", "--username", "AWS", "--password-stdin", registry, stdin=login)
    engine("tag", local, uri)
    engine("push", uri)
    print(f"launch.image={uri}")
    return uri


def _domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


def _repository(ecr: object, name: str) -> None:
    """Make the repository unless it is there; its tags cannot be moved."""
    from launch.aws.clients import code, said

    with said(f"make the ECR repository {name}"):
        try:
            ecr.create_repository(  # type: ignore[attr-defined]
                repositoryName=name,
                imageTagMutability="IMMUTABLE",
                imageScanningConfiguration={"scanOnPush": True},
            )
            print(f"made the ECR repository {name}")
        except Exception as error:
            if code(error) != "RepositoryAlreadyExistsException":
                raise


def _pushed(ecr: object, repository: str, version: str) -> bool:
    from launch.aws.clients import code, said

    with said(f"look into the ECR repository {repository}"):
        try:
            ecr.describe_images(  # type: ignore[attr-defined]
                repositoryName=repository, imageIds=[{"imageTag": version}]
            )
            return True
        except Exception as error:
            if code(error) != "ImageNotFoundException":
                raise
            return False


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The image of training jobs.")
    parser.add_argument("command", choices=("build", "check", "push"))
    add = parser.add_argument
    add("--hardware", default="p6_b200", help="whose hosts run it: x86_64, or arm64 for p6e_gb200")
    add("--repository", default="slipway", help="name of the image, and of the ECR repository")
    add("--region", help="of ECR; else that of the AWS configuration")
    add("--base", default=default_base(), help="image to build on")
    add("--efa", default="", metavar="VERSION", help="EFA installer for a base without EFA")
    add("--dry-run", action="store_true", help="print the commands")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = _options(words)
    os.chdir(ROOT)
    try:
        {"build": build, "check": check, "push": push}[options.command](options)
        return 0
    except Refusal as refusal:
        return report(refusal)
    except CommandFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
